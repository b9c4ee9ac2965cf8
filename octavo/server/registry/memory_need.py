"""`MemoryNeed`, the memory that a model takes, by the planner's ledger, before it is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from octavo.base.errors import UnsupportedModelError
from octavo.cost.engine_profile import EngineProfile, Limits, profile
from octavo.cost.hardware import Device
from octavo.cost.memory import MemoryPlan, memory
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.hub.store import tree_bytes
from octavo.server.engine.generation import EngineFacts
from octavo.settings.engine import EngineArgs, parse_bytes

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of a model in memory. ``kv`` counts swapped blocks too."""

    weights: int
    kv: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations

    def as_json(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "total": self.total}

    def in_words(self) -> str:
        """Return ``1.20 GiB (weights 0.10, KV 1.00, activations 0.10)``."""
        weights, kv, activations = (
            f"{each / GIB:.2f}" for each in (self.weights, self.kv, self.activations)
        )
        return f"{self.total / GIB:.2f} GiB (weights {weights}, KV {kv}, activations {activations})"

    def corrected_by(self, facts: EngineFacts) -> MemoryNeed:
        """Return what the engine says that it has, now that the model is loaded."""
        weights = int(facts.info.get("weights_bytes") or self.weights)
        kv = int(facts.num_blocks * facts.block_size * facts.kv_bytes_per_token) or self.kv
        return MemoryNeed(weights, kv, self.activations)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The memory of a model, and the arguments by which its engine takes no more than that."""

    need: MemoryNeed
    args: EngineArgs


def plan_model(args: EngineArgs, path: Path, *, part: int, budget: int) -> PlannedModel:
    """Return the memory of a model, whose KV pool is made to fit.

    Without ``kv_cache_memory`` or ``num_blocks``, the pool is the one that an engine would take on
    a machine with ``part`` bytes of free memory; or, if no request of the greatest length would fit
    into that, on one with ``budget``.

    Raises:
        ConfigError: a setting does not go with the model.
        ModelError: the model's files are damaged.
    """
    swapped = int(args.swap_space * GIB)
    try:
        plans = [_plan(args, path, room) for room in (part, budget)]
    except UnsupportedModelError:  # transformers may run it, without a word about its memory
        pool = 0 if args.kv_cache_memory is None else parse_bytes(args.kv_cache_memory)
        return PlannedModel(MemoryNeed(_file_bytes(path), pool + swapped, 0), args)
    plan = next((each for each in plans if each.fits), plans[-1])
    kv = plan.kv_bytes
    if args.num_blocks is not None:
        kv = int(args.num_blocks * plan.block_size * plan.kv_bytes_per_token)
    elif args.kv_cache_memory is None:
        given = {"kv_cache_memory", *args.given_settings()}
        args = dataclasses.replace(args, kv_cache_memory=kv, given=given)
    need = MemoryNeed(
        plan.weights_bytes, kv + swapped, int(plan.activations.value) + plan.non_torch_bytes
    )
    return PlannedModel(need, args)


def _plan(args: EngineArgs, path: Path, room: int) -> MemoryPlan:
    """Return the plan of one engine on a machine with ``room`` bytes of free memory."""
    octavo: EngineProfile = profile("octavo")
    spec = open_spec(path)
    precision = precision_of(spec, None, octavo.kv_dtype(args.kv_cache_dtype))
    limits = Limits(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.asked_model_len,
        block_size=args.block_size,
        utilization=1.0,
        kv_cache_memory=(
            None if args.kv_cache_memory is None else parse_bytes(args.kv_cache_memory)
        ),
    )
    kind = "gpu" if args.device.startswith("cuda") else "cpu"
    device = Device(name="this server", kind=kind, memory_bytes=room, memory_bandwidth=1, peaks={})
    return memory(spec, precision, Parallel(), device, octavo, limits)


def _file_bytes(path: Path) -> int:
    return tree_bytes(path) if path.is_dir() else path.stat().st_size
