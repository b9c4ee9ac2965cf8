"""What one rank is asked for, and what it can do: settings are resolved by it, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.lookahead import MAX_MULTI_STEPS
from octavo.models.kv_groups import KVGroups, group_layers

if TYPE_CHECKING:
    from octavo.kernels.cpu.library import Pool
    from octavo.models.config import ModelConfig
    from octavo.runtime.memory_ledger import MemoryLedger

# What results call the types of cached keys and values; those that are not here have one name.
_KV_DTYPES = {"f32": "float32", "bf16": "bfloat16"}

_NO_KERNELS_FOR_SINKS = "the kernels of a GPU do not know sinks: set kernels to reference"

# Without a word from the user, a KV pool on the CPU takes at most this, and half of what is free.
_CPU_KV_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank loads, and what it is to run it on.

    Args:
        path: a model folder or a GGUF file.
        device, dtype: of the activations.
        kernels, kv_cache_dtype, activations, block_size, threads: as in ``EngineArgs``.
        packed_folder: octavo's own: its notes of packed weights, and those that cannot be kept
            beside the model. None keeps none.
        memory_utilization: share of a GPU's memory that this rank may have.
        max_num_seqs, max_num_batched_tokens, max_model_len: of steps, for which a GPU's memory is
            kept back; ``RankLimits`` are these or less. A length of None is the model's.
        enforce_eager: steps are never captured in graphs, where they could be.
        async_scheduling: two steps may be under way, where a device computes beside the host.
        batch_invariant: what is computed of a token has the same bits in any company.
        shared_prefix_decode: native kernels read what block tables begin with alike once a step.
        pool: threads of another rank, which never runs when this one does; None makes its own.
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


@dataclass(frozen=True, slots=True)
class RankLimits:
    """How much a rank is to hold at once; what ``Rank.start`` makes room for.

    ``kv_groups`` are those whose tables requests bring; None: one table for all layers.
    ``num_host_blocks``: that can be copied to host memory; their ids follow those of the pool.
    ``num_state_slots`` are for sequences of a model with recurrent layers.
    """

    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    kv_groups: KVGroups | None = None
    num_host_blocks: int = 0
    num_state_slots: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device and a model allow.

    ``ledger``: where a GPU's memory goes. ``kv_groups`` are those of the model's layers that may
    have block tables of their own; None: all have to share one. ``no_sinks`` is what keeps
    requests from sinks and windows of their own (``core/sink_window.py``); empty for nothing.
    ``state_bytes``: that recurrent layers keep of a sequence.
    """

    device: str
    dtype: str
    model_max_len: int
    kv_bytes_per_token: int
    kv_memory_bytes: int  # that the pool may use if nothing else is said
    kv_dtype: str
    max_multi_steps: int = 1  # tokens that a lone request may decode in one step
    ledger: MemoryLedger | None = None
    kv_groups: KVGroups | None = None
    no_sinks: str = ""
    kv_memory_most: int = 0  # that it may use for a longer context, where that is asked for
    state_bytes: int = 0


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
) -> Capacity:
    """The capacity of a rank that runs a model on the native kernels, or on ops of PyTorch.

    ``has_window_tables``: it reads a block table for each group of layers. ``has_sinks``: it knows
    what requests see.
    """
    from octavo.models.footprint import kv_bytes_per_token

    kv_dtype = kv_dtype_of(spec, is_native)
    return Capacity(
        device=spec.device,
        dtype=spec.dtype,
        model_max_len=config.max_position,
        kv_bytes_per_token=kv_bytes_per_token(config, kv_dtype),
        kv_memory_bytes=max(0, kv_memory_bytes),
        kv_memory_most=max(0, kv_memory_most),
        kv_dtype=kv_dtype,
        max_multi_steps=MAX_MULTI_STEPS if is_native else 1,
        ledger=ledger,
        kv_groups=group_layers(config.kv_layers) if has_window_tables else None,
        no_sinks=_why_no_sinks(config) if has_sinks else _NO_KERNELS_FOR_SINKS,
        state_bytes=sum(spec.num_bytes for spec in config.state_layers),
    )


def _why_no_sinks(config: ModelConfig) -> str:
    """What keeps the layers of a model from seeing sinks and a window."""
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
    """What a KV pool on the CPU takes of the memory that is free beside the weights."""
    return min(_CPU_KV_BYTES, free // 2)


def cpu_kv_most(free: int) -> int:
    """And what it may take where somebody asks for the longest context that fits: activations, and
    others on this machine, need some."""
    return free // 4 * 3


def kv_dtype_of(spec: RankSpec, is_native: bool) -> str:
    """The type of cached keys and values, by its whole name."""
    if spec.kv_cache_dtype == "auto":
        # Beside activations of 15 bits, bfloat16 would be what loses most.
        return "bfloat16" if is_native and spec.activations != "int16" else spec.dtype
    return _KV_DTYPES.get(spec.kv_cache_dtype, spec.kv_cache_dtype)
