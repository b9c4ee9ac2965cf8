"""What a forward pass needs besides the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from octavo.kernels.dispatch import Ops


class Activations(Protocol):
    """What ops take and give, T tokens first: tensors, or what stands for them in a recording."""

    def view(self, tokens: int, /, *shape: int) -> Any: ...


class LayerCaches(Protocol):
    """Keys and values of all layers."""

    def layer(self, index: int) -> tuple[Any, Any]:
        """(keys, values) of a layer, as ``ops.store_kv`` and ``ops.paged_attention`` take them."""
        ...


class ForwardContext(Protocol):
    """One step of T tokens, handed down as an argument from the model to every layer.

    ``plan`` is what ``ops.plan_attention`` made of the step's block tables and lengths. Running a
    model writes the KV of the step's tokens to ``kv_cache``, and changes nothing else.
    """

    @property
    def positions(self) -> Any:
        """int64 [T], the place of each token in its own sequence."""
        ...

    @property
    def slot_mapping(self) -> Any:
        """int64 [T], the slot that a token's KV is written to."""
        ...

    @property
    def plan(self) -> Any: ...
    @property
    def kv_cache(self) -> LayerCaches: ...
    @property
    def ops(self) -> Ops: ...

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> Any:
        """Cosines and sines for all positions of the step, of ``table(num_positions)``."""
        ...
