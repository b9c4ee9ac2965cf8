"""A model on devices, as an engine runs it there: what it holds, and what becomes of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from octavo.cost.engine_profile import EngineProfile, Limits, Settled
from octavo.cost.hardware import Device
from octavo.cost.memory import MemoryPlan, memory
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision
from octavo.cost.prediction import Prediction
from octavo.cost.rank import rank_model
from octavo.cost.step_cost import StepCost, StepModel
from octavo.cost.work import Span
from octavo.planner.calibrated_steps import CalibratedSteps
from octavo.planner.closed_batch import ClosedBatch
from octavo.planner.latency import BatchSlots, Latency, ServiceEstimate
from octavo.planner.steady_state import SteadyState, StepTable
from octavo.planner.traffic import Traffic


@dataclass(frozen=True)
class Deployment:
    """``replicas`` of a model, each laid out over devices of one kind.

    Args:
        measured: steps of this model, which are used where they hold; they may come along to a
            deployment with other bits, devices or layout, and count for nothing there.

    Raises:
        ConfigError: the model cannot be laid out so.
    """

    spec: ModelSpec
    precision: Precision
    device: Device
    parallel: Parallel
    profile: EngineProfile
    limits: Limits
    replicas: int = 1
    measured: CalibratedSteps | None = None

    @property
    def num_devices(self) -> int:
        return self.parallel.num_devices * self.replicas

    @property
    def num_groups(self) -> int:
        """How many lots the requests are dealt out to: each replica, each copy within one, and the
        stages of a pipeline, which work on a lot each."""
        return self.parallel.pp * self.parallel.dp * self.replicas

    @cached_property
    def settled(self) -> Settled:
        """The limits, with the engine's defaults where none was given."""
        return self.profile.settle(self.limits, self.spec, self.device)

    def times(self, replicas: int) -> Deployment:
        """As many replicas. What is known of one of them is known of all."""
        copy = replace(self, replicas=replicas)
        for name in ("settled", "memory", "steps", "_tables"):
            copy.__dict__[name] = getattr(self, name)
        return copy

    def limited(self, **limits: Any) -> Deployment:
        """The same with other limits."""
        return replace(self, limits=replace(self.limits, **limits))

    @cached_property
    def memory(self) -> MemoryPlan:
        """Of the device that has least left."""
        return memory(
            self.spec, self.precision, self.parallel, self.device, self.profile, self.limits
        )

    @property
    def is_measured(self) -> bool:
        """Whether its steps were timed."""
        return self.measured is not None and self.measured.hold_for(
            self.device.name, self.precision, self.parallel, self.profile.name
        )

    @cached_property
    def steps(self) -> StepModel:
        rank = rank_model(self.spec, self.precision, self.parallel)
        if self.measured is None or not self.is_measured:
            return StepModel.of(rank, self.device, self.profile.name)
        from octavo.cost.measured_steps import calibrated

        return calibrated(rank, self.device, self.measured.steps)

    def step_cost(self, chunks: Sequence[Span]) -> StepCost:
        return self.steps.cost(chunks)

    def step_time(self, chunks: Sequence[Span]) -> Prediction:
        return self.steps.cost(chunks).total

    def max_concurrency(self, total_len: int) -> int:
        """Requests of so many tokens whose keys and values fit, in all replicas and copies."""
        return self.memory.max_concurrency(total_len) * self.parallel.dp * self.replicas

    def slots(self, total_len: int) -> BatchSlots:
        """Of one lot of requests."""
        fitting = self.memory.max_concurrency(total_len)
        most = min(self.settled.max_num_seqs, fitting) // self.parallel.pp
        return BatchSlots(
            max(1, most), self.settled.max_num_batched_tokens, self.target_step_seconds
        )

    @property
    def target_step_seconds(self) -> float:
        """Octavo's server keeps prompts from holding up answers; others compute what they can."""
        if self.profile.name != "octavo":
            return 0.0
        from octavo.settings.engine import SERVING_ITL_TARGET_MS  # it takes a while to import

        return SERVING_ITL_TARGET_MS / 1e3

    def serve(self, traffic: Traffic, slots: BatchSlots | None = None) -> ServiceEstimate:
        """What becomes of traffic. ``slots``: of each lot, others than there are."""
        lot, slots = traffic.share(self.num_groups), slots or self.slots(traffic.total_len)
        if lot.rate is None:
            number = (traffic.concurrency or 1) / (lot.concurrency or 1)
            return _EqualGroups(ClosedBatch(self.step_time, lot, slots), number)
        if lot.concurrency is not None:
            slots = replace(slots, max_num_seqs=min(slots.max_num_seqs, lot.concurrency))
        return _EqualGroups(SteadyState(self._table(traffic), lot, slots), self.num_groups)

    def _table(self, traffic: Traffic) -> StepTable:
        """One for all rates of requests of the same lengths."""
        lengths = (traffic.input_len, traffic.output_len)
        if lengths not in self._tables:
            self._tables[lengths] = StepTable(self.step_time, traffic)
        return self._tables[lengths]

    @cached_property
    def _tables(self) -> dict[tuple[int, int], StepTable]:
        return {}


class _EqualGroups:
    """What becomes of so many equal lots of requests, beside each other; a `ServiceEstimate`."""

    def __init__(self, lot: ServiceEstimate, number: float):
        self._lot = lot
        self._number = number

    @property
    def is_stable(self) -> bool:
        return self._lot.is_stable

    @property
    def streams(self) -> Prediction:
        return self._lot.streams * self._number

    @property
    def requests_per_second(self) -> Prediction:
        return self._lot.requests_per_second * self._number

    @property
    def prefill_share(self) -> float:
        return self._lot.prefill_share

    def latency(self, percentile: float | None = None) -> Latency:
        return self._lot.latency(percentile)
