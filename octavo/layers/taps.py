"""Access to a model's residual stream during a forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

from octavo.layers.module import Module


class _Tapped(Module):
    """A module that passes its first input to ``show`` before it runs."""

    def __init__(self, module: Module, show: Callable[[Any], None]):
        self.module = module
        self._show = show

    def forward(self, *inputs: Any) -> Any:
        self._show(inputs[0])
        return self.module(*inputs)


def with_taps(model: Any, depths: Collection[int], show: Callable[[int, Any], None]) -> Any:
    """Return a copy of the model that calls ``show(depth, x)`` with the output of its first
    ``depth`` layers, [T, hidden_size] before the next norm. The model itself stays unchanged."""
    body = model.model
    tapped, inner = copy.copy(model), copy.copy(body)

    def tap(module: Module, depth: int) -> Module:
        return _Tapped(module, lambda x: show(depth, x)) if depth in depths else module

    inner.layers = [tap(layer, depth) for depth, layer in enumerate(body.layers)]
    inner.norm = tap(body.norm, len(body.layers))
    tapped.model = inner
    return tapped
