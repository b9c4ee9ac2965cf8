"""What a forward pass needs besides the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.kernels.dispatch import Ops


class LayerCaches(Protocol):
    """Keys and values of all layers."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        ...


@dataclass(slots=True)
class ForwardContext:
    """One step of T tokens, handed down as an argument from the model to every layer.

    ``plan`` is what ``ops.plan_attention`` made of the step's block tables and lengths. Running a
    model writes the KV of the step's tokens to ``kv_cache``, and changes nothing else.
    """

    positions: Tensor  # int64 [T], the place of each token in its own sequence
    slot_mapping: Tensor  # int64 [T], the slot that a token's KV is written to
    plan: Any
    kv_cache: LayerCaches
    ops: Ops

    def rope_table(self, table: Callable[[int, torch.device], Tensor], rotary_dim: int) -> Tensor:
        """Cosines and sines for all positions of the step; ``table(num_positions, device)``."""
        return table(self.plan.max_seq_len, self.positions.device)
