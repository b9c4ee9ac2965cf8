"""How close a run came to what the machine can do, and what held it back.

The least that the steps had to do (`octavo.cost.work`: every weight read once a step, keys and
values once, two operations for each weight and token) is put over two measured ceilings: bytes that
the processor reads a second, and operations that it does a second with the instruction that the
kernels multiply with. Whichever of the two times is longer binds the run; nothing can be faster,
but for what the caches still hold of the step before. docs/metrics.md has the definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.cost.probing import best_bandwidth, best_rate
from octavo.cost.rank_model import RankModel
from octavo.cost.work import StepWork, step_work

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession, StepTiming
    from octavo.core.executor import Probe, WeightMatrix


@dataclass(frozen=True, slots=True)
class WeightKind:
    """The weights of a step that are computed in one arithmetic.

    Args:
        ops_per_s: the most that was ever measured of it.
    """

    arithmetic: str
    num_params: int
    num_bytes: int
    ops_per_s: float

    @property
    def bits(self) -> float:
        """Of a weight, with its share of scales and of padding."""
        return 8 * self.num_bytes / self.num_params

    def as_json(self) -> dict[str, Any]:
        return {
            "arithmetic": self.arithmetic,
            "params": self.num_params,
            "bytes": self.num_bytes,
            "gops": self.ops_per_s / 1e9,
        }


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that was ever measured here.

    Args:
        bytes_per_s: of reads.
        linear, head, attention: operations a second, in what each part is computed in.
        arithmetic: what that is, for each part.
        weights: what weights are computed in, in the order of the model.
    """

    bytes_per_s: float
    linear: float
    head: float
    attention: float
    arithmetic: tuple[str, str, str]
    weights: tuple[WeightKind, ...] = ()

    def memory_s(self, work: StepWork) -> float:
        return work.total.bytes / self.bytes_per_s

    def compute_s(self, work: StepWork) -> float:
        return (
            work.linear.flops / self.linear
            + work.head.flops / self.head
            + work.attention.flops / self.attention
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "read_gbytes_per_s": self.bytes_per_s / 1e9,
            "linear_gops": self.linear / 1e9,
            "head_gops": self.head / 1e9,
            "attention_gops": self.attention / 1e9,
            "arithmetic": dict(zip(("linear", "head", "attention"), self.arithmetic, strict=True)),
            "weights": [kind.as_json() for kind in self.weights],
        }


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Steps of one kind, against the ceilings. Seconds are sums over ``num_steps``."""

    num_steps: int
    wall_s: float
    work: StepWork
    memory_s: float
    compute_s: float

    @property
    def floor_s(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s >= self.compute_s else "compute"

    @property
    def mbu(self) -> float:
        """Share of the read bandwidth (model bandwidth utilisation)."""
        return self.memory_s / self.wall_s

    @property
    def mfu(self) -> float:
        """Share of the arithmetic (model FLOPs utilisation)."""
        return self.compute_s / self.wall_s

    def as_json(self) -> dict[str, Any]:
        total = self.work.total
        return {
            "bound": self.bound,
            "achieved": self.floor_s / self.wall_s,
            "mbu": self.mbu,
            "mfu": self.mfu,
            "steps": self.num_steps,
            "step_ms": self.wall_s / self.num_steps * 1e3,
            "floor_ms": self.floor_s / self.num_steps * 1e3,
            "bytes": total.bytes,
            "ops": total.flops,
            "gbytes_per_s": total.bytes / self.wall_s / 1e9,
            "gops": total.flops / self.wall_s / 1e9,
        }


@dataclass(frozen=True, slots=True)
class Roofline:
    """Prefill (steps with a piece of a prompt) and decode (all others), apart; None if none ran."""

    ceilings: Ceilings
    prefill: Utilisation | None
    decode: Utilisation | None

    def as_json(self) -> dict[str, Any]:
        return {
            "ceilings": self.ceilings.as_json(),
            "prefill": self.prefill and self.prefill.as_json(),
            "decode": self.decode and self.decode.as_json(),
        }


def draw(session: OfflineSession, steps: Iterable[StepTiming], read_bandwidth: float) -> Roofline:
    """Measure the ceilings, now that the run is over, and put the steps under them.

    Args:
        read_bandwidth: bytes a second that were seen before, as by the Recorder's probes; the
            best of these and of a probe with the engine's own threads is the ceiling.
    """
    if session.info["device"] != "cpu":
        read_bandwidth = 0.0  # that of other memory
    return place(session.rank_model, measure_ceilings(session.probe, read_bandwidth), list(steps))


def place(model: RankModel, ceilings: Ceilings, steps: Sequence[StepTiming]) -> Roofline:
    def of(kind: Sequence[StepTiming]) -> Utilisation | None:
        if not kind:
            return None
        work = sum(
            (step_work(model, step.chunks, step.num_multi_steps) for step in kind), StepWork()
        )
        return Utilisation(
            len(kind),
            sum(step.wall_s for step in kind),
            work,
            ceilings.memory_s(work),
            ceilings.compute_s(work),
        )

    return Roofline(
        ceilings,
        of([step for step in steps if not step.is_pure_decode]),
        of([step for step in steps if step.is_pure_decode]),
    )


# ---- Ceilings


def measure_ceilings(probe: Probe, read_bandwidth: float = 0.0) -> Ceilings:
    """Operations a second for what each part of a step is computed in, and bytes a second."""
    found: dict[str, float] = {}

    def rate(name: str) -> float:
        if name not in found:
            found[name] = best_rate(probe.products(name))
        return found[name]

    def rate_of(parts: Sequence[WeightMatrix]) -> float:
        """Of one part after the other."""
        seconds = sum(matrix.num_params / rate(matrix.arithmetic) for matrix in parts)
        return sum(matrix.num_params for matrix in parts) / seconds

    def kind(arithmetic: str) -> WeightKind:
        of_kind = [matrix for matrix in matrices if matrix.arithmetic == arithmetic]
        num_params = sum(matrix.num_params for matrix in of_kind)
        num_bytes = sum(matrix.num_bytes for matrix in of_kind)
        return WeightKind(arithmetic, num_params, num_bytes, rate(arithmetic))

    matrices = probe.matrices()
    heads = [matrix for matrix in matrices if matrix.is_head]
    layers = [matrix for matrix in matrices if not matrix.is_head]
    return Ceilings(
        max(read_bandwidth, best_bandwidth(probe.reads())),
        rate_of(layers),
        rate_of(heads),
        rate(probe.attention_arithmetic),
        (_names(layers), _names(heads), probe.attention_arithmetic),
        tuple(kind(name) for name in dict.fromkeys(matrix.arithmetic for matrix in matrices)),
    )


def _names(matrices: Sequence[WeightMatrix]) -> str:
    return ", ".join(dict.fromkeys(matrix.arithmetic for matrix in matrices))
