"""The forward pass of the home rank of a pipeline, which has the last stage.

``submit`` sends a step to all ranks and returns: the first stage begins with it. Its result is
computed when it is asked for: the home rank takes the hidden states of the stage before, runs its
own layers and the head, and samples. As many steps are in flight as there are stages::

    stage 0      1 2 3 4 5          submit(1), submit(2), result(1), submit(3), result(2) ...
    stage 1        1 2 3 4 5

What the home rank does itself, steps and copies of KV, it does in the order of its messages, as all
others do: so it keeps a queue of them.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from octavo.base.errors import ConfigError, PeerEndedError
from octavo.core.batch import Batch, TokenLogprobs
from octavo.core.request import Request
from octavo.kernels.cpu.program import Program
from octavo.kernels.recorder import Value
from octavo.kernels.stages import StageOps
from octavo.runtime.capacity import RankLimits
from octavo.runtime.forward import ForwardOutput, KVBlocks, ObservedRunner, SampledRows
from octavo.runtime.leading_forward import LeadingCache, LeadingForward, RecordedTables
from octavo.runtime.native_kv_cache import NativeCache
from octavo.runtime.probe import NativeProbe
from octavo.runtime.stage_forward import StageEnds
from octavo.runtime.stage_links import PipelinePlace, StepMessages

_STEP_NUMBERS = 1 << 31  # those of the wire are int32


class PipelinedForward:
    """Sends steps to all ranks, and computes the last stage of each in turn.

    Args:
        place: of the home rank.
        own: the ops of its stage, which ``program`` runs.
        others: as in ``NativeForward``.
    """

    feeds_tokens = False

    def __init__(
        self,
        place: PipelinePlace,
        own: StageOps,
        program: Program,
        kv_cache: NativeCache,
        limits: RankLimits,
        share_prefixes: bool = True,
        streams: Mapping[int, Value] = MappingProxyType({}),
    ):
        self.depth = place.stage.count
        self.program, self.cache, self.limits = program, kv_cache, limits
        self._queue = _HomeQueue(place.messages)
        self.kv_cache: LeadingCache = _PipelinedCache(self._queue, kv_cache)
        self._ends = StageEnds(place, own, program)
        arguments = program, kv_cache, limits, share_prefixes, streams
        first = _Lane(place.messages, None, *arguments)
        self._tables = first.tables
        self._lanes = [first] + [
            _Lane(place.messages, self._tables, *arguments) for _ in range(self.depth - 1)
        ]
        self._last = first  # that was run
        self._num_steps = 0
        self._seconds_waited = 0.0

    @property
    def kernel_seconds(self) -> float:
        """Time spent in the model so far, with the time that other stages were waited for."""
        return self.program.seconds + self._seconds_waited

    def open_loras(self, dtype: str) -> NoReturn:
        raise ConfigError("adapters: stages have none; set pipeline_parallel_size to 1")

    def exit_after(self, num_layers: int) -> PipelinedForward:
        raise ConfigError(
            f"no exit after layer {num_layers}: its layers are in {self.depth} stages; leave "
            "pipeline_parallel_size at 1"
        )

    def probe(self, runner: ObservedRunner) -> NativeProbe:
        return NativeProbe(runner, self.program, self.cache)

    def feeds(self, request: Request) -> bool:
        return False

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> PipelinedStep:
        number = self._num_steps % _STEP_NUMBERS
        lane = self._lanes[number % self.depth]
        words = lane.write(batch, weighed, number)
        self._queue.send(words)
        self._tables.sent()
        self._num_steps += 1
        step = PipelinedStep(self, self._queue, lane)
        self._queue.add(step)
        return step

    def logits(self, rows: range) -> np.ndarray:
        """See ``Forward``: of the last step, which is the only one in flight."""
        assert self._queue.is_empty, "logits are those of the last step"
        return self._last.logits(rows)

    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        assert self._queue.is_empty, "log-probabilities are those of the last step"
        return self._last.logprobs(rows, token_ids, num_top)

    def hidden_states(self, depth: int) -> np.ndarray:
        return self._last.hidden_states(depth)

    def compute(self, lane: _Lane) -> ForwardOutput:
        """Run the last stage of a step, once the stages before have computed theirs."""
        if not lane.is_taken:
            begin = time.perf_counter()
            try:
                self._ends.take(lane.step_number, lane.num_tokens)
            finally:
                self._seconds_waited += time.perf_counter() - begin
            lane.is_taken = True
        self._last = lane
        return lane.compute()


class _HomeQueue:
    """Messages, and the home rank's own part of them in their order.

    Apart from the forward, whose KV cache refers to it: so both are released with the last
    reference, without a garbage collection.
    """

    def __init__(self, messages: StepMessages):
        self._messages = messages
        self._queue: deque[_Queued] = deque()
        self._num_unread = 0  # pieces of messages, at most, that wait for those who read them

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def add(self, step: PipelinedStep) -> None:
        """Add a step whose message was the last one."""
        step.num_unread = self._num_unread
        self._queue.append(step)

    def send(self, words: array[int]) -> None:
        """Send a message. Others may be waiting for the home rank's part of a step, and read no
        message until then: so the oldest steps are run first where there is no room."""
        pieces = self._messages.pieces(len(words))
        while self._queue and self._num_unread + pieces > self._messages.room:
            self.run_next()
        if not self._queue:
            self._num_unread = 0
        self._messages.send(words)
        self._num_unread += pieces

    def do(self, action: Callable[[], object]) -> None:
        """Have something done behind all steps that were submitted."""
        if self._queue:
            self._queue.append(_Action(action))
        else:
            action()

    def run_next(self) -> None:
        """Do the first thing in the queue. It stays there if that is interrupted."""
        (first := self._queue[0]).run()
        self._queue.popleft()
        # All who have computed a step have read the messages up to its own.
        self._num_unread -= first.num_unread
        for later in self._queue:
            later.num_unread = max(0, later.num_unread - first.num_unread)

    def run_all(self) -> None:
        while self._queue:
            self.run_next()


@dataclass(slots=True)
class _Action:
    """Something other than a step in the queue of the home rank."""

    run: Callable[[], object]
    num_unread: int = 0


class PipelinedStep:
    """A step in flight: a ``PendingForward``.

    ``num_unread``: pieces of messages, its own included, that ranks may not have read before they
    have computed it.
    """

    def __init__(self, forward: PipelinedForward, queue: _HomeQueue, lane: _Lane):
        self._forward, self._queue, self._lane = forward, queue, lane
        self._output: ForwardOutput | None = None
        self._error: Exception | None = None
        self.num_unread = 0

    def run(self) -> None:
        """Compute it in the home rank. What it raises is raised by its result: earlier steps are
        not concerned."""
        try:
            self._output = self._forward.compute(self._lane)
        except PeerEndedError:
            raise
        except Exception as error:
            self._error = error

    def result(self) -> ForwardOutput:
        while self._output is None and self._error is None:
            self._queue.run_next()
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output


_Queued = _Action | PipelinedStep


class _Lane(LeadingForward):
    """The arrays of one step in flight. All lanes share their block tables."""

    def __init__(
        self,
        messages: StepMessages,
        tables: RecordedTables | None,
        program: Program,
        kv_cache: NativeCache,
        limits: RankLimits,
        share_prefixes: bool,
        streams: Mapping[int, Value],
    ):
        self._given_tables = tables
        super().__init__(program, kv_cache, limits, share_prefixes, streams, messages=messages)
        self.num_tokens = 0
        self.is_taken = False  # the values of the stage before have come
        self._longest = 0
        self._sampling = SampledRows(Batch(0, ()), ())

    @property
    def tables(self) -> RecordedTables:
        return self._tables

    def _make_tables(self, *sizes: int) -> RecordedTables:
        return self._given_tables or RecordedTables(*sizes)

    def write(self, batch: Batch, weighed: Collection[str], number: int) -> array[int]:
        """Write the arrays of a step; return its message."""
        self.step_number, self.is_taken = number, False
        self.num_tokens, self._longest = self._write_sequences(batch)
        self._sampling = SampledRows(batch, self._query_start, weighed)
        self._write_step(self._sampling)
        return self._message(self._longest)

    def compute(self) -> ForwardOutput:
        """Run the step that is written, and return its output."""
        self._run(self._longest)
        return self._output(self._sampling, self.num_tokens)

    def _point_at_tables(self, rows: Sequence[int], num_blocks: int) -> None:
        """Copy the rows: tables go on changing before the step is run."""
        self._point_at_copies(rows, num_blocks)

    def _step(self, num_positions: int) -> None:
        """Run the head alone, with the ranks of the last stage."""
        if self.program.group is not None:
            super()._step(num_positions)
        else:
            self._run(num_positions)


class _PipelinedCache(LeadingCache):
    """The same with steps in flight: the home rank's part is done behind theirs."""

    def __init__(self, queue: _HomeQueue, blocks: KVBlocks):
        super().__init__(blocks, queue)
        self._queue = queue

    def wait(self) -> None:
        self._queue.run_all()
        super().wait()

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        super().move(list(block_ids), sources, target)

    def _do(self, action: Callable[[], object]) -> None:
        self._queue.do(action)
