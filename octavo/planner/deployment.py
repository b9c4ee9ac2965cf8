"""A model on devices, run by an engine, with its memory, and the latency and throughput
of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from octavo.core.prompt_chunks import PromptChunks
from octavo.cost.engine_profile import EngineProfile, Limits, Settled, profile
from octavo.cost.hardware import Device
from octavo.cost.measured_steps import MeasuredSteps, calibrated
from octavo.cost.memory import MemoryPlan, memory
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.pipeline import Pipeline, StageTimes
from octavo.cost.precision import Precision, precision_of
from octavo.cost.prediction import Prediction
from octavo.cost.rank import on_devices, rank_model
from octavo.cost.step_cost import StepCost, StepModel
from octavo.cost.work import Span
from octavo.planner.closed_batch import ClosedBatch
from octavo.planner.latency import BatchSlots, ServiceEstimate
from octavo.planner.steady_state import SteadyState, StepTable
from octavo.planner.traffic import Traffic

_ENGINE = "octavo"


@dataclass(frozen=True, slots=True)
class CalibratedSteps:
    """Step times of one model, measured with octavo on one device.

    With another precision, device or layout steps take other times.

    Args:
        device: its name; that of a processor includes its number of threads.
        precision: of the weights and of the KV cache.
    """

    steps: MeasuredSteps
    device: str
    precision: Precision

    @classmethod
    def of(
        cls, steps: MeasuredSteps, spec: ModelSpec, device: str, kv_dtype: str | None = None
    ) -> CalibratedSteps:
        """Steps of a model in the precision of its file, with a KV cache type of octavo's."""
        return cls(steps, device, precision_of(spec, None, profile(_ENGINE).kv_dtype(kv_dtype)))

    def hold_for(self, device: str, precision: Precision, parallel: Parallel, engine: str) -> bool:
        """True if these are the times of that engine, on that device, in that precision."""
        return (
            device == self.device
            and precision == self.precision
            and parallel == Parallel()
            and engine == _ENGINE
        )


class PlannedStages:
    """The stages of a pipeline, for prompts in steps of at most ``most`` tokens; an
    `octavo.planner.latency.Stages`."""

    def __init__(self, pipeline: Pipeline, most: int):
        self.count = len(pipeline.stages)
        self._pipeline, self._most = pipeline, most

    @cached_property
    def prompt_chunks(self) -> PromptChunks:
        return PromptChunks(self.count, self._most, self._pipeline.chunk_seconds)

    def times(self, chunks: Sequence[Span]) -> StageTimes:
        """Return the seconds of a step in each stage."""
        return self._pipeline.times_of(chunks)


@dataclass(frozen=True)
class Deployment:
    """``replicas`` of a model, each laid out over devices of one kind.

    Args:
        measured: step times of this model, which are used where they hold. A copy with another
            precision, device or layout keeps and ignores them.

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

    def __post_init__(self) -> None:
        parallel = on_devices(self.spec, self.parallel, self.device, self.profile)
        object.__setattr__(self, "parallel", parallel)

    @property
    def num_devices(self) -> int:
        return self.parallel.num_devices * self.replicas

    @property
    def num_groups(self) -> int:
        """Number of groups among which requests at a rate are divided: each replica, each
        data-parallel copy, and each stage of a pipeline works on a group."""
        return self.parallel.pp * self.parallel.dp * self.replicas

    @cached_property
    def settled(self) -> Settled:
        """The limits, with the engine's defaults where none was given."""
        return self.profile.settle(self.limits, self.spec, self.device)

    def times(self, replicas: int) -> Deployment:
        """Return as many replicas, which share what was computed of one."""
        copy = replace(self, replicas=replicas)
        for name in ("settled", "memory", "steps", "pipeline", "stages", "_tables"):
            copy.__dict__[name] = getattr(self, name)
        return copy

    def limited(self, **limits: Any) -> Deployment:
        """Return the same deployment with other limits."""
        return replace(self, limits=replace(self.limits, **limits))

    @cached_property
    def memory(self) -> MemoryPlan:
        """Memory of the device that has least left."""
        return memory(
            self.spec, self.precision, self.parallel, self.device, self.profile, self.limits
        )

    @property
    def is_measured(self) -> bool:
        """True if its step times were measured."""
        return self.measured is not None and self.measured.hold_for(
            self.device.name, self.precision, self.parallel, self.profile.name
        )

    @cached_property
    def steps(self) -> StepModel:
        rank = rank_model(self.spec, self.precision, self.parallel)
        if self.measured is None or not self.is_measured:
            return StepModel.of(rank, self.device, self.profile.name)
        return calibrated(rank, self.device, self.measured.steps)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The stages, for a simulation that follows steps from one to the next; None of one."""
        if self.parallel.pp == 1:
            return None
        name = self.profile.name
        return Pipeline.of(self.spec, self.precision, self.parallel, self.device, name)

    @cached_property
    def stages(self) -> PlannedStages | None:
        """The stages of a pipeline; None of one."""
        if self.pipeline is None:
            return None
        return PlannedStages(self.pipeline, self.settled.max_num_batched_tokens)

    def step_cost(self, chunks: Sequence[Span]) -> StepCost:
        return self.steps.cost(chunks)

    def step_time(self, chunks: Sequence[Span]) -> Prediction:
        """Seconds of a step; in a pipeline, until the same requests may be in the next one."""
        seconds = self.steps.prediction(chunks)
        if self.stages is None:
            return seconds
        # The whole model is as if all stages were as long as the longest.
        return seconds * (self.stages.times(chunks).period() / seconds.value)

    def max_concurrency(self, total_len: int) -> int:
        """Number of requests of ``total_len`` tokens whose KV cache fits, in all replicas and
        copies."""
        return self.memory.max_concurrency(total_len) * self.parallel.dp * self.replicas

    def slots(self, total_len: int) -> BatchSlots:
        """Return the slots of one group of requests."""
        slots = self._slots_of_copy(total_len)
        return replace(slots, max_num_seqs=max(1, slots.max_num_seqs // self.parallel.pp))

    def _slots_of_copy(self, total_len: int) -> BatchSlots:
        """Return the slots of all stages together."""
        return BatchSlots(
            max(1, min(self.settled.max_num_seqs, self.memory.max_concurrency(total_len))),
            self.settled.max_num_batched_tokens,
            self.target_step_seconds,
            self.stages,
        )

    @property
    def target_step_seconds(self) -> float:
        """Bound of a step with prompt tokens: octavo's server keeps prompts from delaying answers,
        other engines do not."""
        if self.profile.name != "octavo":
            return 0.0
        from octavo.settings.engine import SERVING_ITL_TARGET_MS  # it takes a while to import

        return SERVING_ITL_TARGET_MS / 1e3

    def serve(self, traffic: Traffic, slots: BatchSlots | None = None) -> ServiceEstimate:
        """Return the latency and throughput of traffic. ``slots``: of each group, instead of its
        own."""
        if traffic.rate is None:
            copy = traffic.share(self.parallel.dp * self.replicas)
            number = (traffic.concurrency or 1) / (copy.concurrency or 1)
            if slots is None:
                slots = self._slots_of_copy(traffic.total_len)
            else:
                slots = replace(slots, max_num_seqs=slots.max_num_seqs * self.parallel.pp)
            return ClosedBatch(self.step_time, copy, slots, number)
        group, slots = traffic.share(self.num_groups), slots or self.slots(traffic.total_len)
        if group.concurrency is not None:
            slots = replace(slots, max_num_seqs=min(slots.max_num_seqs, group.concurrency))
        return SteadyState(self._table(traffic), group, slots, self.num_groups)

    def _table(self, traffic: Traffic) -> StepTable:
        """Return the step table that all rates of requests of the same lengths share."""
        lengths = (traffic.input_len, traffic.output_len)
        if lengths not in self._tables:
            self._tables[lengths] = StepTable(self.step_time, traffic)
        return self._tables[lengths]

    @cached_property
    def _tables(self) -> dict[tuple[int, int], StepTable]:
        return {}
