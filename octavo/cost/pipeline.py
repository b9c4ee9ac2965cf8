"""Time of a step in each stage of a pipeline, for those who follow steps from stage to stage.

    stage 0     embedding, layers     ── hidden states ──▶
    stage 1     layers                ── hidden states ──▶
    last stage  layers, head

Stages have different layers, and the last one the head, so that they take different times: a stage
that waits for another one is idle meanwhile. `octavo.cost.step_cost.StepModel` has the time
through all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.cost.communication import point_to_point, sent_bytes
from octavo.cost.efficiency import Efficiency, efficiency_of
from octavo.cost.hardware import Device
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision
from octavo.cost.rank import stage_models
from octavo.cost.step_cost import StepBatch, StepModel
from octavo.cost.work import Chunk, passes


class StageTimes(NamedTuple):
    """Seconds of a step.

    Args:
        stages: that each stage computes, in their order.
        send: from a stage to the next one, on the mean; stages compute meanwhile.
        overhead: before the step and after it, outside of the stages: scheduling, sampling.
    """

    stages: Sequence[float]
    send: float = 0.0
    overhead: float = 0.0

    @property
    def through_all(self) -> float:
        """Seconds until a step is done that meets no other."""
        return sum(self.stages) + (len(self.stages) - 1) * self.send + self.overhead

    @property
    def slowest(self) -> float:
        """Seconds between two steps at the least."""
        return max(self.stages)

    def period(self, num_steps: float | None = None) -> float:
        """Seconds between two steps of the same requests, where as many steps are under way as
        there are stages, or fewer: those of the slowest stage for all of them, or through all
        stages."""
        count = len(self.stages) if num_steps is None else min(num_steps, len(self.stages))
        return max(self.through_all, count * max(self.slowest, self.overhead))

    def scaled(self, factor: float) -> StageTimes:
        """Return times that are so many times as long."""
        stages = [factor * seconds for seconds in self.stages]
        return StageTimes(stages, factor * self.send, factor * self.overhead)


StageCost = Callable[[StepBatch], StageTimes]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a model on devices of one kind, as an engine runs it there.

    Args:
        stages: each alone, without what comes once a step.
        whole: efficiency of the layout, with the link between stages.
    """

    stages: Sequence[StepModel]
    whole: Efficiency
    parallel: Parallel

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        precision: Precision,
        parallel: Parallel,
        device: Device,
        profile_name: str,
        *,
        eager: bool = False,
    ) -> Pipeline:
        """ConfigError if the model cannot be laid out so."""
        whole = efficiency_of(profile_name, device, parallel, eager=eager)
        alone = replace(whole, step_s=0.0, sequence_s=0.0)
        if parallel.tp == parallel.ep == 1:
            alone = replace(alone, link=None)  # it is between stages only
        models = stage_models(spec, precision, parallel)
        same = {model: StepModel(model, device, alone) for model in set(models)}
        return cls([same[model] for model in models], whole, parallel)

    def times(self, batch: StepBatch) -> StageTimes:
        """Return the times of a step. Where it has several passes, all stages wait for each."""
        return self.times_of(batch.items, batch.num_multi_steps)

    def times_of(self, chunks: Sequence[Chunk], num_multi_steps: int = 1) -> StageTimes:
        """Return the times of a step with these chunks."""
        stages, sends, num_seqs = [0.0] * len(self.stages), 0.0, 0
        for rows in passes(chunks, num_multi_steps):
            num_seqs = max(num_seqs, rows.num_seqs)
            inner = replace(rows, num_sampled=0)  # only the last stage has the head
            of_inner = {stage: stage.pass_seconds(inner) for stage in set(self.stages[:-1])}
            for index, stage in enumerate(self.stages[:-1]):
                stages[index] += of_inner[stage]
            stages[-1] += self.stages[-1].pass_seconds(rows)
            sends += self.send_seconds(rows.num_tokens)
        overhead = self.whole.step_s + num_seqs * self.whole.sequence_s
        return StageTimes(stages, sends, overhead)

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of a step through all stages."""
        return self.times(batch).through_all

    def chunk_seconds(self, num_tokens: int) -> float:
        """Seconds of so many prompt tokens in the slowest stage; an
        `octavo.core.prompt_chunks.StageSeconds`."""
        return max(stage.chunk_seconds(num_tokens) for stage in set(self.stages))

    def send_seconds(self, num_tokens: int) -> float:
        """Seconds from a stage to the next one, on the mean."""
        link = self.whole.link
        if link is None:
            return 0.0
        sent = sum(sent_bytes(stage.model, num_tokens, link) for stage in self.stages)
        hops = len(self.stages) - 1
        return point_to_point(sent / hops, link, self.parallel.tp * self.parallel.pp)


class PipelineClock:
    """Follows steps through the stages of a pipeline, from 0 on.

    A stage computes one step at a time, in their order, so that a short one waits behind a long
    one. No more steps are under way than there are stages. One process reads all results.
    """

    def __init__(self, num_stages: int = 1):
        self._free = [0.0] * num_stages  # when each stage is
        self._done = deque([0.0] * num_stages, num_stages)  # when the last steps were

    @property
    def begins(self) -> float:
        """Time at which the next step may begin."""
        return self._done[0]

    @property
    def done(self) -> float:
        """Time at which the last step was done."""
        return self._done[-1]

    def step(self, times: StageTimes) -> float:
        """Take one more step; returns when it is done."""
        arrives = self._done[0]
        for stage, seconds in enumerate(times.stages):
            self._free[stage] = ended = max(arrives, self._free[stage]) + seconds
            arrives = ended + times.send
        self._done.append(max(self._done[-1], self._free[-1]) + times.overhead)
        return self._done[-1]

    def pass_by(self, seconds: float) -> float:
        """Let so much time pass, with the stages after it as they are before; returns when that is
        done."""
        self._free = [at + seconds for at in self._free]
        self._done = deque((at + seconds for at in self._done), len(self._free))
        return self._done[-1]
