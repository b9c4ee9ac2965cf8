"""A rank's settings, its capacity, and the limits it is started with.

Engine settings are resolved from these, without any weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from octavo.core.lookahead import MAX_MULTI_STEPS
from octavo.kernels.expert_places import ExpertPlaces
from octavo.kernels.parts import WHOLE, WHOLE_MODEL, Part, Stage
from octavo.models.kv_groups import KVGroups, group_layers, one_table

if TYPE_CHECKING:
    from octavo.kernels.cpu.group import ShmGroup
    from octavo.kernels.cpu.library import Pool
    from octavo.models.config import KVSpec, ModelConfig
    from octavo.models.pooling import Pooling
    from octavo.runtime.memory_ledger import MemoryLedger
    from octavo.runtime.stage_links import PipelinePlace

# What results call the types of the KV cache; those that are not here have one name.
_KV_DTYPES = {"f32": "float32", "bf16": "bfloat16"}

_NO_KERNELS_FOR_SINKS = "the kernels of a GPU do not know sinks: set kernels to reference"

# By default a KV pool on the CPU takes at most this, and at most half of the free memory.
_CPU_KV_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The model that a rank loads, and the device and kernels to run it on.

    Args:
        path: a model folder or a GGUF file.
        device, dtype: where and in which type activations are computed.
        kernels, kv_cache_dtype, activations, block_size, threads: as in ``EngineArgs``.
        packed_folder: octavo's cache folder, for packed weights that cannot be kept beside the
            model and records of them. None keeps none.
        memory_utilization: share of a GPU's memory that this rank may use.
        max_num_seqs, max_num_batched_tokens, max_model_len: sizes of a step for which a GPU's
            memory is reserved; ``RankLimits`` must not exceed them. A length of None: the model's.
        enforce_eager: never capture steps in CUDA graphs.
        async_scheduling: two steps may be in flight on a GPU.
        batch_invariant: a token's logits have the same bits whatever else is in the batch.
        shared_prefix_decode: native kernels read blocks that sequences share once a step.
        pool: the threads of another rank, which never runs at the same time; None makes its own.
        memory_share: share of the free memory of a CPU that is this rank's.
        group: the ranks that compute each layer together, of which this is one; None: it is alone.
        meeting_point: a new file of their own, at which ranks of fused kernels find each other.
        experts: the ranks of the group that have each expert of the layers that it has, where they
            have whole ones; None: each has some rows of all.
        by_sequences: each rank of the group has sequences of its own, whose attention it computes.
        pipeline: the rank's place in a pipeline; None: it has all layers.
        has_drafts: tokens are drafted, maybe by heads that read the embedding.
        start_timeout: seconds for which a rank may do nothing while the others start.
        pooling: how hidden states become vectors, where the model is used without its head.
        numa_nodes: where the rank's memory is to be, with a copy of its weights; empty: anywhere.
    """

    path: Path
    device: str = "cpu"
    dtype: str = "float32"
    kernels: str = "auto"
    kv_cache_dtype: str = "auto"
    activations: str = "auto"
    block_size: int = 16
    threads: int | None = None
    packed_folder: Path | None = None
    memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enforce_eager: bool = False
    async_scheduling: bool = True
    batch_invariant: bool = False
    shared_prefix_decode: bool = True
    pool: Pool | None = None
    memory_share: float = 1.0
    group: ShmGroup | None = None
    meeting_point: Path | None = None
    experts: ExpertPlaces | None = None
    by_sequences: bool = False
    pipeline: PipelinePlace | None = None
    has_drafts: bool = False
    start_timeout: float = 120.0
    numa_nodes: tuple[int, ...] = ()
    pooling: Pooling | None = None

    @property
    def part(self) -> Part:
        if self.group is None:
            return WHOLE
        return Part(self.group.rank, self.group.size, self.experts, self.by_sequences)

    @property
    def stage(self) -> Stage:
        return WHOLE_MODEL if self.pipeline is None else self.pipeline.stage

    @property
    def num_ranks(self) -> int:
        """All ranks of the model: of all stages."""
        return self.part.size * self.stage.count

    @property
    def is_home(self) -> bool:
        """Whether this rank is the one that samples: the first of the last stage."""
        return self.part.rank == 0 and self.stage.is_last


@dataclass(frozen=True, slots=True)
class RankLimits:
    """Sizes of the KV cache and of steps, which ``Rank.start`` allocates memory for.

    ``num_blocks``: of the rank's own pool, if each has one.
    ``kv_groups``: the layer groups with block tables of their own; None: one table for all layers.
    ``num_host_blocks``: blocks of the host KV cache; their ids follow those of the pool.
    ``num_state_slots``: slots for the recurrent states of sequences.
    """

    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    kv_groups: KVGroups | None = None
    num_host_blocks: int = 0
    num_state_slots: int = 0


@dataclass(frozen=True, slots=True)
class MachineShare:
    """The share of a KV pool that one machine has.

    Args:
        name: for errors; empty where there is one machine alone.
        kv_bytes_per_token, state_bytes, kv_memory_bytes, kv_memory_most: as of `Capacity`, of what
            this machine has.
        kv_layers: those of its stage among the model's layers with KV; None: all.
        free_bytes: of its memory.
    """

    name: str
    kv_bytes_per_token: int
    state_bytes: int
    kv_memory_bytes: int
    kv_memory_most: int
    kv_layers: range | None = None
    free_bytes: int = 0

    def bytes_of_slot(self, groups: KVGroups | None) -> int:
        """Bytes of a position in a block, where ``groups`` have block tables; None: there is one
        table."""
        if groups is None:
            return self.kv_bytes_per_token
        if self.kv_layers is not None:
            if not self.kv_layers:
                return 0
            groups = groups.of_layers(self.kv_layers)
        return groups.bytes_of_slot(self.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits that a device and a model set, from which an engine's settings are resolved.

    ``ledger``: the uses of a GPU's memory. ``kv_groups``: the model's layer groups that may have
    block tables of their own; None: all layers share one. ``no_sinks``: why requests cannot have
    attention sinks and a window (``core/sink_window.py``); empty if they can. ``state_bytes``: size
    of the recurrent states of one sequence. ``num_parts``: ranks that have a part of each layer, of
    ``kv_bytes_per_token`` each. ``machines``: of a pipeline over several; all else is
    then of all of them together, but for the sizes of memory, which are of this one.
    """

    device: str
    dtype: str
    model_max_len: int
    kv_bytes_per_token: int
    kv_memory_bytes: int  # size of the KV pool by default
    kv_dtype: str
    max_multi_steps: int = 1  # decode steps of one call, where a request is alone
    ledger: MemoryLedger | None = None
    kv_groups: KVGroups | None = None
    no_sinks: str = ""
    kv_memory_most: int = 0  # its size at most, where a longer context is asked for
    state_bytes: int = 0
    num_pools: int = 1  # KV pools of that size, of ranks that have sequences of their own
    machines: tuple[MachineShare, ...] = ()
    num_parts: int = 1
    kv_of_one_step: bool = False  # every text is computed in one step, and forgotten

    @property
    def shares(self) -> tuple[MachineShare, ...]:
        """The shares of all machines that have the KV pool: one at least."""
        sizes = self.kv_bytes_per_token, self.state_bytes, self.kv_memory_bytes, self.kv_memory_most
        return self.machines or (MachineShare("", *sizes),)


def capacity_of(
    spec: RankSpec,
    config: ModelConfig,
    *,
    is_native: bool,
    kv_memory_bytes: int,
    kv_memory_most: int = 0,
    has_window_tables: bool = True,
    has_sinks: bool = True,
    ledger: MemoryLedger | None = None,
    kv_layers: Sequence[KVSpec] | None = None,
) -> Capacity:
    """Return the capacity of a rank by its settings and its model's config.

    ``is_native``: it runs the native CPU kernels. ``has_window_tables``, ``has_sinks``: see
    ``Backend``. ``kv_layers``: of the rank that has most; None: as `Part` deals them.
    """
    from octavo.models.footprint import kv_bytes_of, kv_bytes_per_token

    kv_dtype, part = kv_dtype_of(spec, is_native), spec.part
    # All ranks have the same blocks: the largest share decides. Stages have the layers of one model
    # together.
    if kv_layers is not None:
        token_bytes = kv_bytes_of(kv_layers, kv_dtype)
    else:
        parts = part.of_all_ranks()
        token_bytes = max(kv_bytes_per_token(config, kv_dtype, each) for each in parts)
    state_bytes = max(
        sum(layer.num_bytes for layer in config.state_layers_of(each))
        for each in part.of_all_ranks()
    )
    num_sharing = part.size if spec.device == "cpu" else 1  # GPUs have memory of their own
    return Capacity(
        device=spec.device,
        dtype=spec.dtype,
        model_max_len=config.max_position,
        kv_bytes_per_token=token_bytes,
        kv_memory_bytes=max(0, kv_memory_bytes) // num_sharing,
        kv_memory_most=max(0, kv_memory_most) // num_sharing,
        kv_dtype=kv_dtype,
        max_multi_steps=MAX_MULTI_STEPS
        if is_native and spec.stage.is_whole and spec.pooling is None
        else 1,
        ledger=ledger,
        # Tokens that see what comes after them need all blocks at once.
        kv_groups=_groups_of_stages(config, spec.stage)
        if has_window_tables and not config.bidirectional
        else None,
        no_sinks=_why_no_sinks(config) if has_sinks else _NO_KERNELS_FOR_SINKS,
        state_bytes=state_bytes,
        num_pools=part.size if part.by_sequences else 1,
        num_parts=1 if part.by_sequences else part.size,
        kv_of_one_step=config.bidirectional,
    )


def machine_share(
    name: str, spec: RankSpec, config: ModelConfig, layers: StageLayers, free_bytes: int
) -> MachineShare:
    """Return the share of the machine that has a stage, with all ranks of it.

    Args:
        spec: of any rank of the pipeline, which runs on native kernels.
        layers: of the stage.
        free_bytes: of the machine, beside the weights and what steps need.
    """
    from octavo.models.footprint import kv_bytes_of, kv_layers_of

    kv_dtype, parts = kv_dtype_of(spec, is_native=True), list(spec.part.of_all_ranks())
    kv = [kv_layers_of(config, each)[layers.kv.start : layers.kv.stop] for each in parts]
    states = [config.state_layers_of(each) for each in parts]
    own = [each[layers.states.start : layers.states.stop] for each in states]
    # All ranks have the same blocks: the largest share decides.
    return MachineShare(
        name,
        kv_bytes_per_token=len(parts) * max(kv_bytes_of(each, kv_dtype) for each in kv),
        state_bytes=len(parts) * max(sum(layer.num_bytes for layer in each) for each in own),
        kv_memory_bytes=cpu_kv_bytes(free_bytes),
        kv_memory_most=cpu_kv_most(free_bytes),
        kv_layers=layers.kv,
        free_bytes=free_bytes,
    )


class StageLayers(NamedTuple):
    """The layers of a stage that have KV, and those that have states: each among their kind."""

    kv: range
    states: range


def _groups_of_stages(config: ModelConfig, stage: Stage) -> KVGroups:
    """Return the groups of a model's layers, with a block as large as those of all stages are
    together."""
    groups = group_layers(config.kv_layers, stage.count)
    if stage.is_whole or groups.num_groups == 1:
        return groups
    if len(config.kv_layers) != config.num_layers:  # layers of stages are not those that have KV
        return one_table(len(config.kv_layers))
    each = (Stage(i, stage.count).layers(config.num_layers) for i in range(stage.count))
    return replace(
        groups, layers_per_block=sum(groups.of_layers(own).layers_per_block for own in each)
    )


def _why_no_sinks(config: ModelConfig) -> str:
    """Return why a model cannot have attention sinks and a window, empty if it can."""
    kinds = {spec.kind for spec in config.kv_layers}
    if kinds != {"full"}:
        return f"only layers that see all can, and {config.name} has others ({', '.join(kinds)})"
    if config.recurrence is not None:
        return f"only layers that see all can, and those of {config.name} that recur forget nothing"
    if config.learned_positions is not None:
        return f"positions of {config.name} are looked up, and not rotated"
    if config.rope.scaling == "dynamic":
        return f"rotations of {config.name} depend on how long a sequence is (dynamic scaling)"
    return ""


def cpu_kv_bytes(free: int) -> int:
    """Return the default size of a KV pool on the CPU, given the free memory beside the weights."""
    return min(_CPU_KV_BYTES, free // 2)


def cpu_kv_most(free: int) -> int:
    """Return the size of a KV pool for the longest context that fits on the CPU: a quarter of the
    free memory is left to activations and other programs."""
    return free // 4 * 3


def kv_dtype_of(spec: RankSpec, is_native: bool) -> str:
    """Return the type of the KV cache by its full name, such as ``bfloat16``."""
    if spec.kv_cache_dtype == "auto":
        if spec.pooling is not None:  # it lasts for a text: its size does not matter
            return "float32" if is_native else spec.dtype
        # Beside activations of 15 bits, bfloat16 would lose the most precision.
        return "bfloat16" if is_native and spec.activations != "int16" else spec.dtype
    return _KV_DTYPES.get(spec.kv_cache_dtype, spec.kv_cache_dtype)
