"""Latency and throughput of Poisson arrivals in the long run, where the load settles.

Streams get a token in each step. A step with a piece of a prompt takes longer, for all streams in
it. Beside B others, steps with and without prompts make a stream's mean time between tokens; and
with that time, requests at a given rate make a number of streams. The load settles where both agree
(`octavo.planner.queueing.balance`), or grows without end. As arrivals at random see the mean of
what is there, so do streams: each has B others beside it where B are there.

A prompt waits for the step that is under way, then for the prompts before it (M/D/1), and for a
slot where all are taken (M/M/k). In a pipeline, the pieces of a prompt follow each other through
the stages, each of which works on a batch. These are approximations. The number of streams, and the
number of prompts that come during a stream, are taken to vary as arrivals do (Poisson).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from statistics import NormalDist

from octavo.core.prefill_pacing import prompt_tokens_in_step
from octavo.cost.pipeline import StageTimes
from octavo.cost.prediction import Prediction, worst
from octavo.cost.work import Span
from octavo.planner.latency import (
    ENDS,
    BatchSlots,
    Latency,
    Stages,
    StepTime,
    between,
    done_at,
    prompt_chunks,
    stage_times,
)
from octavo.planner.queueing import (
    balance,
    delays_quantile,
    md1_wait,
    md1_wait_quantile,
    mmk_wait,
    mmk_wait_quantile,
)
from octavo.planner.traffic import Traffic


class StepTable:
    """Seconds of steps with some streams, half way to their ends, and some equal pieces of prompts.

    For requests of given lengths, whatever their rate.
    """

    def __init__(self, step_time: StepTime, traffic: Traffic):
        self.known: dict[tuple[int, Span | None, int], Prediction] = {}
        self._step_time = step_time
        self._times: dict[tuple[int, Span | None], StageTimes] = {}
        self._stream = Span(traffic.input_len + traffic.output_len // 2 - 1, 1)

    def __call__(self, streams: int, chunk: Span | None = None, count: int = 1) -> Prediction:
        key = (streams, chunk, count)
        if key not in self.known:
            pieces = [] if chunk is None else [chunk] * count
            self.known[key] = self._step_time([self._stream] * streams + pieces)
        return self.known[key]

    def times(self, stages: Stages | None, streams: int, chunk: Span | None = None) -> StageTimes:
        """Seconds of such a step in each stage."""
        key = (streams, chunk)
        if key not in self._times:
            pieces = [] if chunk is None else [chunk]
            self._times[key] = stage_times([self._stream] * streams + pieces, stages)
        return self._times[key]


class SteadyState:
    """Latency and throughput where the load settles; an `octavo.planner.latency.ServiceEstimate`.

    At an end of the predictions at which the queue grows, figures are ``math.inf``. ``groups``:
    equal groups of such requests beside each other, each with slots of its own.
    """

    def __init__(self, costs: StepTable, traffic: Traffic, slots: BatchSlots, groups: float = 1.0):
        self._groups = groups
        assert traffic.rate is not None
        self._rate = traffic.rate
        steps = [_Steps(costs, traffic, slots, end) for end in ENDS]
        self._loads = [_Load(each, traffic.rate, slots.max_num_seqs) for each in steps]
        self._source = worst(cost.source for cost in costs.known.values())

    @property
    def is_stable(self) -> bool:
        """True if the queue stays finite, by the middle of the predictions."""
        return self._loads[0].is_stable

    @property
    def streams(self) -> Prediction:
        return self._between(lambda load: load.streams) * self._groups

    @property
    def requests_per_second(self) -> Prediction:
        """Completions, which in the long run are as many as arrivals."""
        return Prediction.around(self._rate, 0.0, self._source) * self._groups

    @property
    def prefill_share(self) -> float:
        return self._loads[0].prefill_share

    def latency(self, percentile: float | None = None) -> Latency:
        return Latency(
            self._between(lambda load: load.ttft(percentile)),
            self._between(lambda load: load.tpot(percentile)),
            self._between(lambda load: load.e2e(percentile)),
        )

    def _between(self, figure: Callable[[_Load], float]) -> Prediction:
        ends = [figure(load) if load.is_stable else math.inf for load in self._loads]
        return between(ends, self._source)


class _Steps:
    """Seconds of steps by one end of their predictions.

    Numbers of streams need not be whole: between two, the cost is a straight line.
    """

    def __init__(self, costs: StepTable, traffic: Traffic, slots: BatchSlots, end: str):
        self.input_len = traffic.input_len
        self.gaps = traffic.output_len - 1  # between the tokens of an answer
        self._budget = slots.max_num_batched_tokens
        self._target = slots.target_step_seconds
        self.num_stages = slots.num_stages
        self._stages = slots.stages
        self._costs = costs
        self._end = end
        # Several figures are asked for beside the same streams, one after the other.
        self._last_room = -1.0, 0
        self._last_prompt: tuple[float, list[float]] = -1.0, []

    def decode(self, streams: float) -> float:
        """Seconds of a step without prompts, of one stream at least. Where streams are too few for
        all stages, they do not wait for each other."""
        seconds = self._line(max(1.0, streams))
        if self.num_stages == 1 or streams >= 1:
            return seconds
        times = self._costs.times(self._stages, 1)
        return seconds * times.period(max(1.0, streams * self.num_stages)) / times.period()

    def prompt(self, streams: float) -> float:
        """Seconds of all the steps that one prompt takes beside some streams."""
        return sum(self._prompt_steps(streams))

    def first_token(self, streams: float) -> float:
        """Seconds until they are done: in a pipeline, several are under way at once."""
        times = [self._times(streams, chunk) for chunk in self._chunks(streams)]
        return done_at(self._prompt_steps(streams), times)

    def _times(self, streams: float, chunk: Span) -> StageTimes:
        """Seconds in each stage of a step of about so many streams."""
        return self._costs.times(self._stages, math.floor(streams + 0.5), chunk)

    def num_chunks(self, streams: float) -> int:
        return len(self._prompt_steps(streams))

    def _prompt_steps(self, streams: float) -> list[float]:
        if self._last_prompt[0] != streams:
            chunks = self._chunks(streams)
            self._last_prompt = streams, [self._line(streams, chunk) for chunk in chunks]
        return self._last_prompt[1]

    def _chunks(self, streams: float) -> list[Span]:
        return prompt_chunks(self.input_len, self.room(streams), self._stages)

    def full(self, streams: float) -> float:
        """Seconds of one step with as many whole prompts as it can hold."""
        return self._line(streams, Span(0, self.input_len), self.room(streams) // self.input_len)

    def room(self, streams: float) -> int:
        """Number of prompt tokens that a step can hold, at least 1; fewer where a step would keep
        streams waiting for longer than the target."""
        if self._last_room[0] != streams:
            self._last_room = streams, self._room(streams)
        return self._last_room[1]

    def _room(self, streams: float) -> int:
        room = max(1, self._budget - math.ceil(streams))
        if not self._target or streams < 1:
            return room
        decode, tokens = self.decode(streams), min(room, self.input_len)
        each = (self._line(streams, Span(0, tokens)) - decode) / tokens
        return min(room, prompt_tokens_in_step(self._target, decode, each))

    def _line(self, streams: float, chunk: Span | None = None, count: int = 1) -> float:
        """Interpolate between the costs at the whole numbers of streams around it."""
        below = math.floor(streams)
        low = self._cost(below, chunk, count)
        if below == streams:
            return low
        return low + (self._cost(below + 1, chunk, count) - low) * (streams - below)

    def _cost(self, streams: int, chunk: Span | None, count: int) -> float:
        seconds: float = getattr(self._costs(streams, chunk, count), self._end)
        return seconds


def _joint(one: float, other: float) -> float:
    """Return the deviation of a sum from its mean, of independent parts."""
    return math.copysign(math.hypot(one, other), one + other)


class _Load:
    """The load at some rate, by one end of the predictions."""

    def __init__(self, steps: _Steps, rate: float, slots: int):
        self._steps = steps
        self._rate = rate
        self._slots = slots
        settled = balance(lambda others: rate * steps.gaps * self._tpot_beside(others), slots)
        self.streams = math.inf if settled is None else settled
        self.is_stable = settled is not None and self._ends()

    def _ends(self) -> bool:
        """True if all that comes is also computed where the load settles.

        Answers of one token leave no streams, and prompts may be too many all the same. And pacing
        may leave prompts less room beside the streams that there are than beside one more: then a
        delay may bring another one or more, and the sums below would not converge.
        """
        has_gaps_that_end = math.isfinite(self._tpot_beside(self.streams))
        return has_gaps_that_end and self._rate * self._delay < 1

    @cached_property
    def prefill_share(self) -> float:
        """Share of the time by which prompts prolong steps."""
        return min(1.0, self._rate * self._delay)

    def ttft(self, percentile: float | None) -> float:
        steps, streams = self._steps, self.streams
        own, prompt = steps.first_token(streams), steps.prompt(streams)
        service = prompt if steps.num_chunks(streams) > 1 else self._packed(streams)
        stay = steps.gaps * self._tpot_beside(streams)
        # A prompt may begin whenever the first stage is free, whatever batch that works on then:
        # all batches have one queue.
        stages = steps.num_stages
        step, service = self._step_under_way / stages, service / stages
        rate, slots = self._rate * stages, self._slots * stages
        if percentile is None:
            return own + step / 2 + md1_wait(rate, service) + mmk_wait(rate, stay, slots)
        share = percentile / 100
        waits = md1_wait_quantile(rate, service, share)
        waits += mmk_wait_quantile(rate, stay, slots, share)
        return own + step * share + waits

    def tpot(self, percentile: float | None) -> float:
        gaps = self._steps.gaps
        if not gaps:
            return 0.0
        mean = self._tpot_beside(self.streams)
        if percentile is None:
            return mean
        share = percentile / 100
        delay, met = self._delay, self._rate * (gaps * mean + self._steps.first_token(self.streams))
        further = self._rate * delay
        by_prompts = delay * (delays_quantile(met * (1 - further), further, share) - met) / gaps
        by_streams = NormalDist().inv_cdf(share) * self._decode_spread
        return mean + _joint(by_prompts, by_streams)

    def e2e(self, percentile: float | None) -> float:
        mean = self.ttft(None) + self._steps.gaps * self.tpot(None)
        if percentile is None:
            return mean
        first = self.ttft(percentile) - self.ttft(None)
        rest = self._steps.gaps * (self.tpot(percentile) - self.tpot(None))
        return mean + _joint(first, rest)

    def _tpot_beside(self, others: float) -> float:
        """Mean time between two tokens of a stream, with prompts in between: ``math.inf`` where
        they come faster than they are computed."""
        steps, rate = self._steps, self._rate
        streams = min(others + 1, self._slots)
        decode, prompt = steps.decode(streams), steps.prompt(streams)
        if rate * prompt < 1:
            extra = prompt - steps.num_chunks(streams) * decode
            # Prompts that came while its own was computed are computed while it decodes.
            before = rate * extra * steps.first_token(streams) / max(1, steps.gaps)
            return (decode + before) / (1 - rate * extra)
        # Every step has prompts: as many as come while it lasts, if there is room for them.
        each = self._packed(streams)
        together = rate * (prompt - each) / (1 - rate * each) if rate * each < 1 else math.inf
        if together > steps.room(streams) / steps.input_len:
            return math.inf
        return together / rate

    def _packed(self, streams: float) -> float:
        """Seconds of one more prompt in a step that has one."""
        steps = self._steps
        count = steps.room(streams) // steps.input_len
        if count < 2:
            return steps.prompt(streams)
        return (steps.full(streams) - steps.prompt(streams)) / (count - 1)

    @property
    def _delay(self) -> float:
        """Seconds by which a prompt delays the streams beside it."""
        steps, streams = self._steps, self.streams
        extra = steps.prompt(streams) - steps.num_chunks(streams) * steps.decode(streams)
        shared = self._rate * steps.prompt(streams) >= 1
        # A short prompt that is alone may take less than a step of one stream.
        return self._packed(streams) if shared else max(0.0, extra)

    @property
    def _decode_spread(self) -> float:
        """Standard deviation of the time of a step, for the number of streams in it."""
        more = min(self.streams + math.sqrt(self.streams), self._slots)
        return self._steps.decode(more) - self._steps.decode(min(self.streams, more))

    @property
    def _step_under_way(self) -> float:
        """Mean seconds of the step that an arrival meets; 0 where the engine is idle.

        Prompts of several steps are counted where they are waited for.
        """
        steps, streams = self._steps, self.streams
        decode, prompt = steps.decode(streams), steps.prompt(streams)
        busy = min(1.0, self._rate * prompt)
        with_prompt = prompt if steps.num_chunks(streams) == 1 else 0.0
        not_idle = 1 - math.exp(-streams)
        return busy * with_prompt + (1 - busy) * not_idle * decode
