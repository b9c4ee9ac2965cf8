"""A model that shows its residual stream on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

from octavo.layers.module import Module


class _Tapped(Module):
    """Shows what it is handed, and does what the module does."""

    def __init__(self, module: Module, show: Callable[[Any], None]):
        self.module = module
        self._show = show

    def forward(self, *inputs: Any) -> Any:
        self._show(inputs[0])
        return self.module(*inputs)


def with_taps(model: Any, depths: Collection[int], show: Callable[[int, Any], None]) -> Any:
    """The same model, which calls ``show(depth, x)`` with what its first ``depth`` layers have
    made, [T, hidden_size] before the next norm. The model itself stays as it is."""
    body = model.model
    tapped, inner = copy.copy(model), copy.copy(body)

    def tap(module: Module, depth: int) -> Module:
        return _Tapped(module, lambda x: show(depth, x)) if depth in depths else module

    inner.layers = [tap(layer, depth) for depth, layer in enumerate(body.layers)]
    inner.norm = tap(body.norm, len(body.layers))
    tapped.model = inner
    return tapped
