"""Paged attention of ops of PyTorch: its plan for a step, and its calls by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.attention import ReferenceAttentionPlan
from octavo.kernels.dispatch import Ops
from octavo.kernels.kv_stores import KVStore
from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.models.kv_groups import KVGroups
from octavo.quantization.tensors import WeightTensor
from octavo.runtime.input_batch import StepInputs


class LayerCaches(Protocol):
    """The KV cache, by layers."""

    def layer(self, index: int) -> tuple[KVStore, KVStore]: ...


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The attention inputs of layers with the same block tables in one step."""

    slots: Tensor  # int64 [T], the KV slot of each token
    plan: ReferenceAttentionPlan


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The ``StepAttention`` of one step.

    ``groups`` has the inputs of each layer group, and ``group_of`` the group of each layer.
    """

    ops: Ops
    kv_cache: LayerCaches
    groups: Sequence[GroupInputs]
    group_of: Sequence[int]

    @property
    def num_positions(self) -> int:
        """The number of positions that rope tables must have."""
        return self.groups[0].plan.num_angles

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        rotated: Callable[[Tensor], Tensor] | None = None,
        bidirectional: bool = False,
    ) -> Tensor:
        group = self.groups[self.group_of[layer]]
        if group.plan.angles:
            assert rotated is not None, f"layer {layer} knows no rotations for sinks"
            q = torch.cat([q, *map(rotated, group.plan.angles)])
        keys, values = self.kv_cache.layer(layer)
        self.ops.store_kv(k, v, keys, values, group.slots)
        attended: Tensor = self.ops.paged_attention(
            q, keys, values, group.plan, scale, window, softcap, sinks, bidirectional
        )
        return attended

    def attend_latents(
        self,
        layer: int,
        q: Tensor,
        ckv: Tensor,
        norm: RowNorm,
        rotation: RopeArguments,
        kv_b: WeightTensor,
        *,
        scale: float,
    ) -> Tensor:
        group = self.groups[self.group_of[layer]]
        kept = self.kv_cache.layer(layer)
        self.ops.store_latents(ckv, norm, rotation, *kept, group.slots)
        attended: Tensor = self.ops.latent_attention(q, kv_b, rotation, *kept, group.plan, scale)
        return attended


class EagerAttention:
    """Creates the ``PagedAttention`` of steps for the ops of a device."""

    def __init__(
        self,
        ops: Ops,
        kv_cache: LayerCaches,
        block_size: int,
        groups: KVGroups,
        to_device: Callable[[np.ndarray], Tensor],
    ):
        self._ops = ops
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._group_of = [group for group, _ in groups.places]
        self._to_device = to_device

    def plan(self, inputs: StepInputs) -> PagedAttention:
        """Return the attention of a step, with all that its layers share."""
        query_start = self._to_device(inputs.query_start)
        seq_lens = self._to_device(inputs.seq_lens)
        max_query_len = int(np.diff(inputs.query_start).max())
        max_seq_len = int(inputs.seq_lens.max())
        parents = None if inputs.parents is None else self._to_device(inputs.parents)
        groups = [
            GroupInputs(
                self._to_device(slots),
                self._ops.plan_attention(
                    self._to_device(tables),
                    query_start,
                    seq_lens,
                    max_query_len,
                    max_seq_len,
                    self._block_size,
                    parents,
                    inputs.sink_windows,
                ),
            )
            for tables, slots in zip(inputs.block_tables, inputs.slot_mapping, strict=True)
        ]
        return PagedAttention(self._ops, self._kv_cache, groups, self._group_of)
