"""Latency and throughput of requests that begin together, which are followed step by step to their
ends.

They are alike, and steps go by the rules of octavo's scheduler (`octavo.core.scheduler`): streams
first, then prompts in their order as far as the budget of tokens goes. In a pipeline a step has a
share of both, and as many are under way as there are stages. So nothing but the costs of steps is
estimated. Steps in which only the lengths of the streams change are taken many at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.prefill_pacing import Pacer
from octavo.cost.pipeline import PipelineClock
from octavo.cost.prediction import Prediction, Source, worst
from octavo.cost.work import Span
from octavo.measure.statistics import mean_or_percentile
from octavo.planner.latency import (
    ENDS,
    BatchSlots,
    Latency,
    StepTime,
    between,
    in_stages,
    stage_times,
)
from octavo.planner.traffic import Traffic

# Number of similar steps that pacing remembers.
_REMEMBERED = 20

# Steps that are taken at once, at the mean cost of the first and the last of them: costs rise with
# the length in a straight line almost everywhere.
_STRIDE = 64


class ClosedBatch:
    """Latency and throughput of requests that begin together; an
    `octavo.planner.latency.ServiceEstimate`.

    ``groups``: equal groups of such requests beside each other, each with slots of its own.
    """

    is_stable = True  # no more requests come

    def __init__(
        self, step_time: StepTime, traffic: Traffic, slots: BatchSlots, groups: float = 1.0
    ):
        self._groups = groups
        walk = _BatchRun(step_time, traffic, slots)
        walk.run()
        self._source = worst(walk.sources)
        self._outcomes = [_RequestTimes.of(walk, end) for end in ENDS]
        self.prefill_share = walk.prefill_seconds / self._outcomes[0].makespan

    @property
    def streams(self) -> Prediction:
        """Mean number of streams, until the last of them ends."""
        means = (sum(each.e2e) / each.makespan for each in self._outcomes)
        return self._between(*means) * self._groups

    @property
    def requests_per_second(self) -> Prediction:
        rates = (len(each.e2e) / each.makespan for each in self._outcomes)
        return self._between(*rates) * self._groups

    def latency(self, percentile: float | None = None) -> Latency:
        return Latency(
            self._between(*(mean_or_percentile(each.ttft, percentile) for each in self._outcomes)),
            self._between(*(mean_or_percentile(each.tpot, percentile) for each in self._outcomes)),
            self._between(*(mean_or_percentile(each.e2e, percentile) for each in self._outcomes)),
        )

    def _between(self, *ends: float) -> Prediction:
        return between(ends, self._source)


@dataclass(frozen=True, slots=True)
class _RequestTimes:
    """Seconds of each request, by one end of the interval of step costs."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    e2e: tuple[float, ...]

    @classmethod
    def of(cls, walk: _BatchRun, end: str) -> _RequestTimes:
        clock = walk.done[end]
        ttft = tuple(clock[request.first] for request in walk.requests)
        e2e = tuple(clock[request.last] for request in walk.requests)
        gaps = max(1, walk.traffic.output_len - 1)  # an answer of one token has no time between
        return cls(
            ttft, tuple((last - first) / gaps for first, last in zip(ttft, e2e, strict=True)), e2e
        )

    @property
    def makespan(self) -> float:
        return max(self.e2e)


@dataclass(slots=True, eq=False)
class _Request:
    """Progress of a request. ``first`` and ``last``: indices of the strides that brought those
    tokens. ``in_step``: number of the step that brought the last."""

    computed: int = 0
    produced: int = 0
    first: int = 0
    last: int = 0
    in_step: int = 0


class _PacedStep(NamedTuple):
    """A step, as far as pacing needs it."""

    items: list[Span]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class _BatchRun:
    """The course of a batch. ``done``: when each stride was done, a step or several similar ones,
    by each of the ``ENDS``."""

    def __init__(self, step_time: StepTime, traffic: Traffic, slots: BatchSlots):
        self.traffic = traffic
        self.done: dict[str, list[float]] = {end: [] for end in ENDS}
        self.sources: set[Source] = set()
        self.prefill_seconds = 0.0
        self.requests = [_Request() for _ in range(traffic.concurrency or 1)]
        self._step_time = step_time
        self._slots = slots
        self._depth = slots.num_stages
        self._clocks = {end: PipelineClock(self._depth) for end in ENDS}
        self._num_steps = 0
        self._waiting = self.requests[::-1]
        self._running: list[_Request] = []
        self._pacer = Pacer(slots.target_step_seconds)
        self._chunk = slots.max_num_batched_tokens  # of prompts, in a step
        if slots.stages is not None:
            self._chunk = slots.stages.prompt_chunks.size(len(self.requests) * traffic.input_len)

    def run(self) -> None:
        while self._waiting or self._running:
            decoding = [each for each in self._running if each.produced]
            # Those that need a single token come first: streams, and prompts but for one.
            singles = self._share(decoding)
            singles += [each for each in self._running if self._left(each) == 1]
            singles = singles[: self._slots.max_num_batched_tokens]
            taken = [each for each in singles if each.produced]
            prompts = [(each, 1) for each in singles if not each.produced]
            prompts += self._prompts(self._budget(len(singles)))
            if prompts:
                self._step(taken, prompts)
            else:
                self._stride(taken if self._depth == 1 else decoding)
            self._running = [
                each for each in self._running if each.produced < self.traffic.output_len
            ]

    def _share(self, decoding: list[_Request]) -> list[_Request]:
        """Return the streams of the next step: its share of those that are in none."""
        ready = [each for each in decoding if each.in_step <= self._num_steps - self._depth]
        return ready[: -(-len(decoding) // self._depth)]

    def _left(self, request: _Request) -> int:
        """Number of tokens of its prompt that are still to be computed."""
        return self.traffic.input_len - request.computed

    def _budget(self, num_singles: int) -> int:
        """Number of tokens of a step that are left for prompts."""
        left = self._slots.max_num_batched_tokens - num_singles
        return int(min(left, self._chunk, self._pacer.prompt_tokens(num_singles)))

    def _prompts(self, budget: int) -> list[tuple[_Request, int]]:
        """Return the prompts of a step with their numbers of tokens; requests that are admitted for
        it run then."""
        chunks = []
        started = [each for each in self._running if self._left(each) > 1]
        while budget > 0:
            if started:
                request = started.pop(0)
            elif self._waiting and len(self._running) < self._slots.max_num_seqs:
                request = self._waiting.pop()
                self._running.append(request)
            else:
                break
            tokens = min(budget, self._left(request))
            chunks.append((request, tokens))
            budget -= tokens
        return chunks

    def _step(self, decoding: list[_Request], prompts: list[tuple[_Request, int]]) -> None:
        """Compute one step, with pieces of prompts in it."""
        streams = self._chunks(decoding)
        rows = streams.copy()
        for request, tokens in prompts:
            ends = request.computed + tokens == self.traffic.input_len
            rows.append(Span(request.computed, tokens, int(ends)))
            request.computed += tokens
            if ends:
                request.first = self._num_strides
                self._produce(request, 1)
        for request in decoding:
            self._produce(request, 1)
        seconds, times = self._step_time(rows), stage_times(rows, self._slots.stages)
        clock = self._clocks["value"]
        could_run = max(clock.begins, clock.done)
        for end in ENDS:
            done = self._clocks[end].step(in_stages(getattr(seconds, end), times))
            self.done[end].append(done)
        self.sources.add(seconds.source)
        self._num_steps += 1
        self._pacer.observe(_PacedStep(rows), clock.done - could_run)
        # The time of the streams alone is not counted as the prompts'.
        beside = self._step_time(streams).value if streams else 0.0
        self.prefill_seconds += (seconds.value - beside) / self._depth

    def _stride(self, decoding: list[_Request]) -> None:
        """Compute as many steps as no request begins or ends in; in a pipeline, of each of the
        groups that take turns."""
        left = min(self.traffic.output_len - each.produced for each in decoding)
        count, groups = min(left, _STRIDE), min(len(decoding), self._depth)
        group = decoding[:: self._depth]
        first = self._period(group, groups)
        last = first if count == 1 else self._period(group, groups, count - 1)
        if self._slots.target_step_seconds:
            for _ in range(min(count, _REMEMBERED)):
                self._pacer.observe(_PacedStep(self._chunks(group)), last.value / groups)
        self._num_steps += self._depth * count
        for number, request in enumerate(decoding):
            self._produce(request, count)
            turn = number * self._depth // len(decoding)
            request.in_step = self._num_steps - self._depth + turn
        seconds = (first + last) * (count / 2)
        self.sources.add(seconds.source)
        for end in ENDS:
            self.done[end].append(self._clocks[end].pass_by(getattr(seconds, end)))

    def _period(self, group: list[_Request], num_groups: int, later: int = 0) -> Prediction:
        """Seconds until a group, one of some, gets its next token; or one some steps later."""
        rows = self._chunks(group, later)
        seconds = self._step_time(rows)
        if num_groups == self._depth:
            return seconds
        times = stage_times(rows, self._slots.stages)
        return seconds * (times.period(num_groups) / times.period())

    def _chunks(self, decoding: list[_Request], later: int = 0) -> list[Span]:
        """Return the next tokens of streams, or those of some steps later."""
        before = self.traffic.input_len + later - 1
        return [Span(before + each.produced, 1) for each in decoding]

    @property
    def _num_strides(self) -> int:
        return len(self.done["value"])

    def _produce(self, request: _Request, count: int) -> None:
        request.produced += count
        request.last, request.in_step = self._num_strides, self._num_steps
