"""The executor of simulations: a cost function and a virtual clock in place of a model.

The scheduler and the block manager above it are those of production, so that a simulation shows
their behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from zlib import crc32

from octavo.core.batch import Batch, Draft, ScheduledRequest, StepOutput
from octavo.core.clock import VirtualClock
from octavo.core.executor import NoModel
from octavo.core.lookahead import multi_steps_in_time
from octavo.core.request import Request


def filler_token(request: Request, position: int) -> int:
    """Return a token that no prompt contains and that differs by request and position."""
    return -1 - crc32(f"{request.request_id} {position}".encode())


class StageTimes(Protocol):
    """Seconds of a step in each stage of a pipeline, to send to the next one, and before and after
    them all."""

    @property
    def stages(self) -> Sequence[float]: ...
    @property
    def send(self) -> float: ...
    @property
    def overhead(self) -> float: ...


class StageSpan(NamedTuple):
    """The moments at which a stage begins a step, and ends it."""

    begun: float
    ended: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that ends at a time of the virtual clock."""

    ready_at: float
    output: StepOutput
    clock: VirtualClock

    def result(self) -> StepOutput:
        self.clock.advance_to(self.ready_at)
        return self.output


class SimulatedExecutor:
    """Runs batches in simulated time, with made-up tokens.

    Args:
        cost: returns the seconds of a batch; see :meth:`octavo.cost.step_cost.StepModel.seconds`.
        clock: the clock of the engine, which a step's result moves to the step's end.
        num_blocks: the size of the simulated KV pool.
        next_token: returns the token of a request at a position. The default makes up tokens; a
            replay can return those of a real run.
        depth: batches that may be in flight.
        feeds_tokens: a request may be in several of them; they are run one after the other.
            Otherwise each begins when the one before it is through the first of ``depth`` equal
            stages, as in a pipeline; see ``stage_cost`` for others.
        host_seconds: the time to plan and submit a batch, which overlaps with running steps.
        stage_cost: returns the seconds of a batch in each stage of a pipeline of ``depth`` stages,
            instead of ``cost``; each stage computes one batch at a time, in their order.
        accept: returns the accepted tokens of a draft, as indices down one path, such as
            ``runtime.acceptance.Synthetic.path``. The default goes by ``next_token``.
    """

    def __init__(
        self,
        cost: Callable[[Batch], float],
        clock: VirtualClock,
        num_blocks: int,
        next_token: Callable[[Request, int], int] = filler_token,
        depth: int = 1,
        *,
        feeds_tokens: bool = False,
        host_seconds: float = 0.0,
        stage_cost: Callable[[Batch], StageTimes] | None = None,
        accept: Callable[[Request, Draft], Sequence[int]] | None = None,
    ):
        self.depth = depth
        self.feeds_tokens = feeds_tokens
        self._cost = cost
        self._clock = clock
        self._num_blocks = num_blocks
        self._next_token = next_token
        self._host_seconds = host_seconds
        self._accept = accept
        self._num_stages = 1 if feeds_tokens else depth
        self._stage_cost = stage_cost
        self._free_at = [0.0] * self._num_stages  # the stages
        self._results_read_at = 0.0
        self.last_stages: tuple[StageSpan, ...] = ()  # of the step that was submitted last

    def feeds(self, request: Request) -> bool:
        return self.feeds_tokens

    def kv_capacity(self) -> int:
        return self._num_blocks

    def submit(self, batch: Batch) -> SimulatedStep:
        self._clock.advance_to(self._clock.now() + self._host_seconds)
        batch = self._with_multi_steps_in_time(batch)
        ready_at = self._run(batch)
        tokens = {
            item.request.request_id: self._tokens(item) for item in batch.items if item.num_sampled
        }
        return SimulatedStep(ready_at, StepOutput(tokens), self._clock)

    def probe(self) -> NoModel:
        return NoModel()

    def close(self) -> None:
        pass

    def _run(self, batch: Batch) -> float:
        """Return when a batch is done."""
        if self._stage_cost is None:
            cost = self._cost(batch)
            start = max(self._clock.now(), self._free_at[0])
            self._free_at[0] = start + cost / self._num_stages
            return start + cost
        times, spans = self._stage_cost(batch), []
        arrives = self._clock.now()
        for stage, seconds in enumerate(times.stages):
            begun = max(arrives, self._free_at[stage])
            self._free_at[stage] = ended = begun + seconds
            spans.append(StageSpan(begun, ended))
            arrives = ended + times.send
        self.last_stages = tuple(spans)
        # One process plans all steps and reads all results.
        self._results_read_at = max(spans[-1].ended, self._results_read_at) + times.overhead
        return self._results_read_at

    def _with_multi_steps_in_time(self, batch: Batch) -> Batch:
        """Return the batch with as many decode steps as the native kernels would take."""
        if batch.num_multi_steps == 1:
            return batch
        single = replace(batch, items=tuple(replace(item, num_sampled=1) for item in batch.items))
        steps = multi_steps_in_time(batch.num_multi_steps, self._cost(single))
        return replace(batch, items=tuple(replace(i, num_sampled=steps) for i in batch.items))

    def _tokens(self, item: ScheduledRequest) -> list[int]:
        if item.num_sampled == 1:
            return [self._next_token(item.request, item.start + item.num_tokens)]
        positions = range(item.end, item.end + item.num_sampled)
        tokens = [self._next_token(item.request, position) for position in positions]
        if item.draft is None:
            return tokens
        if self._accept is None:
            return tokens[: len(item.draft.path(tokens)) + 1]
        path = self._accept(item.request, item.draft)
        return [*(item.draft.token_ids[index] for index in path), tokens[len(path)]]
