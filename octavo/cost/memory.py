"""Memory of a device: the parts that a model takes, and the rest, which is for KV.

    KV = utilization x reported - weights - activations - non-torch - graphs - reserve

as far as an engine keeps these back itself (``engine_profile.py``). Reported is what the driver
reports to an allocator, not what the sheet says. Of a pipeline, the stage that has room for the
fewest tokens decides, as all stages hold the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from octavo.cost.engine_profile import EngineProfile, Limits, Room, Settled, number_that_fits
from octavo.cost.hardware import Device
from octavo.cost.kv import attention_ops, sequence_bytes
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision
from octavo.cost.prediction import Prediction
from octavo.cost.rank import check_layout, stage_layers, stage_weights
from octavo.cost.rank_model import AttentionOp
from octavo.cost.weight_shape import WeightShape
from octavo.models.tensor_split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of one device, in bytes. What is no Prediction is exact, or the engine's rule.

    Args:
        total_bytes: that the device reports. usable_bytes: that the engine may use.
        activations: of the largest step. non_torch_bytes, graphs_bytes: see ``EngineProfile``.
        kept_back_bytes: what of these, and of the reserve, is not for the KV pool.
        left: for the KV pool; less than 0 is what is missing.
        kv_bytes: of the KV pool.
        num_blocks: of the KV pool, of ``block_size`` tokens in all layers.
        num_pools: of other tokens each, on devices with requests of their own.
        attention: the layers whose keys and values lie here.
        limits: those that it was computed for.
    """

    total_bytes: int
    usable_bytes: int
    weights_bytes: int
    activations: Prediction
    non_torch_bytes: int
    graphs_bytes: int
    kept_back_bytes: int
    left: Prediction
    kv_bytes: int
    block_size: int
    num_blocks: int
    attention: tuple[AttentionOp, ...]
    limits: Settled
    keeps_windows_only: bool
    num_pools: int = 1

    @property
    def left_bytes(self) -> int:
        return int(self.left.value)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of a token in all layers of this device whose windows it lies in."""
        return sum(op.count * op.kv_bytes_per_token for op in self.attention)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit at once, as engines report it: as if every layer kept all of
        them."""
        return self.num_pools * self.num_blocks * self.block_size

    @property
    def longest_sequence(self) -> int:
        """Number of tokens that one sequence can have room for, in a pool of its own."""
        return self.kv_tokens // self.num_pools

    def max_concurrency(self, length: int) -> int:
        """Sequences of ``length`` tokens that have room for what they keep at once."""
        if self._is_uniform:
            return self.num_pools * (self.num_blocks // -(-length // self.block_size))
        needed = sequence_bytes(
            self.attention,
            length,
            block_size=self.block_size,
            step_tokens=self.limits.max_num_batched_tokens,
            keeps_windows_only=self.keeps_windows_only,
        )
        return self.num_pools * number_that_fits(self.kv_bytes, needed)

    @property
    def fits(self) -> bool:
        """Whether the weights fit, and one sequence of the greatest length beside them."""
        return self.max_concurrency(self.limits.max_model_len) >= 1

    @property
    def _is_uniform(self) -> bool:
        """Whether all layers keep as much of a token, for as long as its sequence lasts."""
        return all(
            not op.state_bytes and (op.window is None or not self.keeps_windows_only)
            for op in self.attention
        )


def memory(
    spec: ModelSpec,
    precision: Precision,
    parallel: Parallel,
    device: Device,
    profile: EngineProfile,
    limits: Limits | None = None,
) -> MemoryPlan:
    """The memory plan of the fullest device of a layout.

    ConfigError if the model cannot be laid out so, or ``limits`` cannot be kept.
    """
    check_layout(spec, parallel)
    profile = profile.on(device)
    settled = profile.settle(limits or Limits(), spec, device)
    case = _Case(spec, precision, parallel, device, profile, settled)
    stages = (case.stage(index) for index in range(parallel.pp))
    return min(stages, key=lambda each: (each.max_concurrency(1), each.left_bytes))


@dataclass(frozen=True, slots=True)
class _Case:
    """The inputs that memory depends on."""

    spec: ModelSpec
    precision: Precision
    parallel: Parallel
    device: Device
    profile: EngineProfile
    limits: Settled

    def stage(self, index: int) -> MemoryPlan:
        """A device of one stage of the pipeline."""
        weights = held_bytes(
            self.spec,
            self.precision,
            self.parallel,
            index,
            self.profile.embedding_in_host and self.device.kind == "gpu",
            self.profile.mxfp4_unit,
        )
        needs = self._needs(weights)
        kept_back = sum(
            (needs[name] for name in sorted(self.profile.keeps_back)),
            Prediction.sure(self.limits.reserve_bytes),
        )
        usable = self.limits.utilization * self.device.memory_bytes
        left = kept_back.map(lambda num_bytes: usable - weights - num_bytes)
        span = stage_layers(self.spec, self.parallel, index)
        layers = self.spec.layers[span.start : span.stop]
        shares, num_pools = self.parallel.attention_shares, self.parallel.num_pools
        attention = attention_ops(layers, self.precision, shares, num_pools)
        kv_bytes, num_blocks = self._pool(max(0.0, left.value), attention)
        return MemoryPlan(
            total_bytes=int(self.device.memory_bytes),
            usable_bytes=int(usable),
            weights_bytes=weights,
            activations=needs["activations"],
            non_torch_bytes=int(needs["non_torch"].value),
            graphs_bytes=int(needs["graphs"].value),
            kept_back_bytes=int(kept_back.value),
            left=left,
            kv_bytes=int(kv_bytes),
            block_size=self.limits.block_size,
            num_blocks=num_blocks,
            attention=attention,
            limits=self.limits,
            keeps_windows_only=self.profile.keeps_windows_only(self.device),
            num_pools=num_pools,
        )

    def _needs(self, weights_bytes: int) -> dict[str, Prediction]:
        """Bytes that a device needs beside weights and KV, by the names of ``keeps_back``."""
        alone, beside_others = self.profile.non_torch
        return {
            "activations": self.profile.activations(self.spec, self.parallel, self.limits),
            "non_torch": alone if self.parallel.tp == self.parallel.ep == 1 else beside_others,
            "graphs": self.profile.graphs(weights_bytes),
        }

    def _pool(self, left: float, attention: tuple[AttentionOp, ...]) -> tuple[float, int]:
        """Bytes and blocks of the KV pool."""
        token_bytes = sum(op.count * op.kv_bytes_per_token for op in attention)
        given = self.limits.kv_cache_memory
        if not token_bytes:
            room = left if given is None else given
            return room, self._blocks_of_states(room, attention)
        block_bytes = self.limits.block_size * token_bytes
        if given is not None:
            num_blocks = number_that_fits(given, block_bytes)
        else:
            num_ranks = self.parallel.tp if self.parallel.scheme == "gather" else 1
            left_over = Room(self.device, left, block_bytes, self.precision.kv.name, num_ranks)
            num_blocks = self.profile.num_blocks(left_over, self.limits)
        return num_blocks * block_bytes, num_blocks

    def _blocks_of_states(self, num_bytes: float, attention: tuple[AttentionOp, ...]) -> int:
        """Bytes for as many whole sequences as fit, for models that keep nothing per token."""
        seqs = number_that_fits(num_bytes, sequence_bytes(attention, 1))
        blocks = -(-self.limits.max_model_len // self.limits.block_size)
        return min(seqs, self.limits.max_num_seqs) * blocks


@lru_cache(maxsize=64)
def held_bytes(
    spec: ModelSpec,
    precision: Precision,
    parallel: Parallel,
    stage: int,
    embedding_in_host: bool,
    mxfp4_unit: int,
) -> int:
    """Bytes of the weights that a device of a stage has."""
    total = 0.0
    shares: dict[tuple[str | int, ...], WeightShape] = {}  # of many layers
    for weight in stage_weights(spec, parallel, stage):
        if embedding_in_host and weight.part == "embedding" and not spec.tie_embeddings:
            continue
        sizes = weight.outputs, weight.inputs, weight.units, weight.experts
        alike = (weight.name, weight.part, *sizes, weight.query_heads, weight.kv_heads)
        if alike not in shares:
            shares[alike] = weight.of_rank(parallel)
        share = shares[alike]
        if weight.has_experts and precision.type_of(weight).name == "mxfp4":
            share = _padded(share, mxfp4_unit)
        total += precision.num_bytes(weight, share)
    return round(total)


def _padded(share: WeightShape, unit: int) -> WeightShape:
    """Experts whose inner size is made a multiple of ``unit``."""
    if share.split is Split.OUTPUTS:
        return replace(share, outputs=-(-share.outputs // unit) * unit)
    return replace(share, inputs=-(-share.inputs // unit) * unit if share.inputs else 0)
