"""A forward pass on a GPU, which the host only launches: two steps may be in flight.

Of a step the host writes the inputs into a buffer of its own and queues the rest: the copy, the
fused program, the choice of tokens, and the copy of these back to the host, which looks at them
when it has launched the next step. Nothing on the way asks the device anything. A step of plain
decoding is one graph, replayed; any other is launched kernel by kernel.

On the CPU, with the ops of ``kernels/cuda/plain_ops.py`` and a ``HostStream``, this is the slow
twin of that: the same code but for the kernels, and answers like those of ``eager_forward.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch, TokenLogprobs
from octavo.core.executor import Probe
from octavo.core.request import Request
from octavo.kernels.cuda.ops import StepTensors
from octavo.kernels.cuda.sampling import (
    RECORD_WORDS,
    Asked,
    DeviceSampler,
    SampledTokens,
    SamplingTensors,
)
from octavo.kernels.fused_ops import CannotFuse
from octavo.kernels.recorder import Value
from octavo.runtime import cuda_warmup
from octavo.runtime.capacity import RankLimits
from octavo.runtime.cuda_graphs import DecodeGraphs
from octavo.runtime.cuda_inputs import DeviceInputs, StepShape, StepViews
from octavo.runtime.cuda_sampling import REASONS, LogprobRows, SamplingArrays, needs_host
from octavo.runtime.forward import ForwardOutput, Observed, SampledRows
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.prompt_logits import LOGITS_ROWS
from octavo.runtime.sampler import compute_logprobs, probabilities
from octavo.runtime.sampling_row import DraftedRow, sampling_row
from octavo.runtime.streams import Event, Stream, Work

# What a graph samples for. Steps that ask for more are sampled again, from the same logits.
_CAPTURED = Asked(cuts=True)
_NUM_LANES = 2  # steps in flight


def num_logits_rows(limits: RankLimits) -> int:
    """Rows of which logits are made at once. Those of more, of drafts, come in several parts."""
    return max(limits.max_num_seqs, LOGITS_ROWS)


class StepProgram(Protocol):
    """A model's step on static buffers; see ``kernels/cuda/program.py``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def damaged(self) -> Tensor:
        """int32 [max_tokens]: not 0 for rows of the last step that are no numbers."""
        ...

    def run(self, step: StepTensors) -> None:
        """All of a step but its head."""
        ...

    def reset(self) -> None:
        """Undo what a step leaves behind of which not all was launched."""
        ...

    def logits(self, rows: Tensor, out: Tensor) -> None:
        """The head, over some rows (int32 [R]) of the last step: float32 [R, V]."""
        ...

    def buffer(self, value: Value) -> Tensor:
        """What the last step has left of a value that is kept: [max_tokens, width]."""
        ...

    def exit_after(self, num_layers: int) -> StepProgram: ...


class CudaForward:
    """Runs batches of one model by its fused program.

    Args:
        make_probe: what says of the model what a runner is asked.
        captures: whether decode steps are captured, where the stream is any faster by it.
        runs_ahead: a step may be launched before the results of the one before it are there.
        kept: the values that the program keeps, by their depth.
        beside: another forward of the same stream, in whose memory steps leave their logits and
            tokens: what either has left is gone when the other has run.
    """

    def __init__(
        self,
        program: StepProgram,
        kv_cache: KVCache,
        sampler: DeviceSampler,
        stream: Stream,
        limits: RankLimits,
        make_probe: Callable[[Observed], Probe],
        *,
        captures: bool = True,
        runs_ahead: bool = True,
        kept: Mapping[int, Value] = MappingProxyType({}),
        beside: CudaForward | None = None,
    ):
        self.program = program
        self.depth = _NUM_LANES if runs_ahead else 1
        self.kv_cache = QueuedBlocks(kv_cache, stream)
        self.kernel_seconds = 0.0
        self._stream, self._sampler, self._limits = stream, sampler, limits
        self._make_probe, self._kept = make_probe, kept
        seats, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self._inputs = DeviceInputs(
            stream.device,
            seats,
            limits.max_model_len,
            tokens,
            kv_cache.block_size,
            kv_cache.num_groups,
        )
        rows = num_logits_rows(limits)
        if beside is None:
            self._sampled = SampledTokens.allocate(max(seats, tokens), stream.device)
            self._logits = torch.zeros(rows, program.vocab_size, device=stream.device)
        else:
            self._sampled, self._logits = beside._sampled, beside._logits
        self._records = torch.zeros(rows, RECORD_WORDS, dtype=torch.int32)
        self._arrays = SamplingArrays(self._records, program.vocab_size, stream.host_buffer)
        self._lanes = [self._make_lane() for _ in range(_NUM_LANES)]
        self._last_result_at: float | None = None
        self._num_tokens = 0  # of the last step
        self.graphs: DecodeGraphs | None = None
        if captures and stream.captures:
            self.graphs = DecodeGraphs(
                stream,
                min(seats, tokens),
                self._decode,
                program.reset,
                lambda size: self._stage_nothing(StepShape.decode(size)),
            )
        stream.catch_up()  # with all that was made here, and before

    def warm_up(self) -> None:
        """Have all kernels compiled, by steps of nobody (``cuda_warmup.py``), and wait for it."""
        for shape in cuda_warmup.shapes(self._limits, len(self._records)):
            views, rows = self._inputs.views(shape), slice(0, shape.num_rows)
            asked = cuda_warmup.everything(shape.num_rows, self.program.vocab_size)
            self._stage_nothing(shape)
            self._stream.launch(self._as_launched(views, [_Part(rows, *each) for each in asked]))
        self.kv_cache.copy_blocks([(0, 0)])
        self._stream.mark().wait()

    def capture(self) -> None:
        """Capture decode steps of all sizes (``cuda_graphs.py``), where that is wanted."""
        if self.graphs is not None:
            self.graphs.capture()

    def _make_lane(self) -> StepBuffer:
        def like(tensor: Tensor) -> Tensor:
            return self._stream.host_buffer(tensor.numel(), tensor.dtype).view(tensor.shape)

        words = self._stream.host_buffer(self._inputs.num_words, torch.int32)
        sampled = SampledTokens(like(self._sampled.answers), like(self._sampled.logprobs))
        return StepBuffer(words, sampled, like(self.program.damaged), self._stream.mark())

    def feeds(self, request: Request) -> bool:
        """Whether steps may go on from tokens of a request that the host has not seen."""
        return needs_host(request.params) is None

    def exit_after(self, num_layers: int) -> CudaForward:
        """As :meth:`octavo.runtime.forward.Forward.exit_after`. It takes memory for its inputs, and
        shares all else."""
        try:
            program = self.program.exit_after(num_layers)
        except CannotFuse as error:
            raise ConfigError(f"no exit after layer {num_layers}: {error}") from error
        return CudaForward(
            program,
            self.kv_cache.cache,
            self._sampler,
            self._stream,
            self._limits,
            self._make_probe,
            captures=False,
            runs_ahead=self.depth > 1,
            beside=self,
        )

    def probe(self, runner: Observed) -> Probe:
        return self._make_probe(runner)

    def run(self, batch: Batch, weighed: Collection[str] = ()) -> ForwardOutput:
        return self.submit(batch, weighed).result()

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> LaunchedStep:
        """Launch a batch. Of the steps before it, the results of all but the last have been taken,
        and tokens of requests that it goes on from are fed to it if they are not known yet."""
        size = self._size_of(batch)
        lane = self._free_lane()
        starts = [0, *accumulate([item.num_tokens for item in batch.items])]
        sampling = SampledRows(batch, starts, weighed)
        parts, records = self._describe(batch, sampling.requests)
        padded = None if size is None else StepShape.decode(size)
        staged = self._inputs.stage(batch, sampling.at, records, lane.words, padded)
        views = self._inputs.views(staged.shape)
        compute = self._as_launched(views, parts)
        if self.graphs is not None and size is not None:
            compute = self._as_replayed(self.graphs[size], views, parts)
        num_logprobs = len(sampling.at) if any(p.asked.num_top is not None for p in parts) else 0

        def work() -> None:
            self._inputs.upload(staged, lane.words)
            compute()
            lane.fetch(self._sampled, num_logprobs, self.program.damaged, starts[-1])

        try:
            self._stream.launch(work)
        except Exception:  # its requests are run again, or fail; the next step must not see it
            self._stream.launch(self.program.reset)
            raise
        lane.event = self._stream.mark()
        self._lanes.append(self._lanes.pop(0))
        self._num_tokens = starts[-1]
        return LaunchedStep(self, lane, starts, sampling, time.perf_counter())

    def _size_of(self, batch: Batch) -> int | None:
        """The size of the graph that a batch is launched as, None for kernel by kernel."""
        return None if self.graphs is None else self.graphs.size_of(batch)

    def _free_lane(self) -> StepBuffer:
        """The one that was used longest ago, whose results have been taken."""
        lane = self._lanes[0]
        lane.event.wait()
        return lane

    def _describe(
        self, batch: Batch, requests: Sequence[Request | DraftedRow]
    ) -> tuple[list[_Part], np.ndarray]:
        """How rows become tokens: what they ask for, and their records, int32 [R, words]."""
        positions = _positions(batch)
        records = np.empty((len(requests), RECORD_WORDS), np.int32)
        parts: list[_Part] = []
        for first in range(0, len(requests), len(self._records)):
            rows = slice(first, first + len(self._records))
            own, arrays = requests[rows], self._arrays
            asked = arrays.write(own, positions[rows])
            records[rows] = self._records[: len(own)].numpy()
            parts.append(
                _Part(
                    slice(first, first + len(own)),
                    asked,
                    arrays.masks,
                    arrays.edit_starts,
                    arrays.edits,
                )
            )
        return parts, records

    # -- what the device does ----------------------------------------------------------------

    def _as_launched(self, views: StepViews, parts: Iterable[_Part]) -> Work:
        """A step, kernel by kernel."""

        def work() -> None:
            self._compute(views)
            for part in parts:
                self._find_logits(views, part.rows)
                self._choose(views, part)

        return work

    def _as_replayed(self, replay: Work, views: StepViews, parts: Iterable[_Part]) -> Work:
        """A step by its graph, and by what its rows ask beyond that."""

        def work() -> None:
            replay()
            for part in parts:
                if part.asked._replace(cuts=True) != _CAPTURED:
                    self._choose(views, part)

        return work

    def _decode(self, size: int) -> Work:
        """A decode step of a size, whatever is in its inputs by then."""
        views = self._inputs.views(StepShape.decode(size))
        return self._as_launched(views, [_Part(slice(0, size), _CAPTURED)])

    def _stage_nothing(self, shape: StepShape) -> None:
        """Queue the inputs of a step of nobody."""
        lane = self._free_lane()
        staged = self._inputs.stage_nothing(shape, lane.words)
        self._stream.launch(lambda: self._inputs.upload(staged, lane.words))
        lane.event = self._stream.mark()

    def _compute(self, views: StepViews) -> None:
        self._inputs.gather_tables(views)
        self._sampler.resolve(views.step.token_ids, self._inputs.last_tokens)
        self.program.run(views.step)

    def _find_logits(self, views: StepViews, rows: slice) -> None:
        self.program.logits(views.rows[rows], self._logits[: rows.stop - rows.start])

    def _choose(self, views: StepViews, part: _Part) -> None:
        rows = part.rows
        masks, starts, edits = (
            each if each is None else each.to(self._stream.device, non_blocking=True)
            for each in (part.masks, part.edit_starts, part.edits)
        )
        self._sampler.sample(
            self._logits[: rows.stop - rows.start],
            SamplingTensors(
                views.records[rows],
                views.row_seats[rows],
                self._inputs.last_tokens,
                masks,
                starts,
                edits,
            ),
            part.asked,
            SampledTokens(self._sampled.answers[:, rows], self._sampled.logprobs[rows]),
        )

    # -- what else is asked of the last step ------------------------------------------------------

    def logits(self, rows: range) -> Tensor:
        return self._logits_of(rows)

    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        with torch.inference_mode():
            return compute_logprobs(self.logits(rows), token_ids, num_top)

    def hidden_states(self, depth: int) -> np.ndarray:
        kept = self.program.buffer(self._kept[depth])
        return kept[: self._num_tokens].float().cpu().numpy()

    def _logits_of(self, rows: Sequence[int]) -> Tensor:
        """A further call, of the head alone."""
        found = self._logits[: len(rows)]
        at = torch.tensor(rows, dtype=torch.int32)
        self._stream.launch(lambda: self.program.logits(at.to(self._stream.device), found))
        self._stream.mark().wait()
        return found

    def _probabilities(
        self, rows: Sequence[int], requests: Sequence[Request | DraftedRow]
    ) -> np.ndarray:
        """What rows of the last step are sampled from: float32 [R, V]."""
        found = []
        most = len(self._records)
        with torch.inference_mode():
            for first in range(0, len(rows), most):
                logits = self._logits_of(rows[first : first + most])
                own = [sampling_row(request) for request in requests[first : first + most]]
                found.append(probabilities(logits, own).cpu().numpy())
        return np.concatenate(found)

    def rows_of(self, step: LaunchedStep) -> ForwardOutput:
        """What a step has left, when it has ended."""
        lane, sampling = step.lane, step.sampling
        lane.event.wait()
        now, begun = time.perf_counter(), step.begun_at
        self.kernel_seconds += now - max(begun, self._last_result_at or begun)
        self._last_result_at = now
        count = len(sampling.at)
        damaged = lane.damaged[: step.starts[-1]].numpy().nonzero()[0].tolist()
        rows = ForwardOutput(step.starts, damaged)
        token_ids, status = lane.sampled.answers[:, :count].tolist()
        logprob_rows = LogprobRows(lane.sampled.logprobs.numpy(), self.program.vocab_size)
        sampling.give(
            rows,
            token_ids,
            {row: REASONS[code] for row, code in enumerate(status) if code},
            lambda row: logprob_rows.entry(
                row, token_ids[row], sampling.requests[row].params.logprobs or 0
            ),
        )
        if at := sampling.weighed:
            own = [sampling.requests[row] for row in at]
            found = self._probabilities([sampling.at[row] for row in at], own)
            sampling.give_probabilities(rows, found)
        return rows


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched: ``PendingRows``."""

    forward: CudaForward
    lane: StepBuffer
    starts: list[int]
    sampling: SampledRows
    begun_at: float

    def result(self) -> ForwardOutput:
        return self.forward.rows_of(self)


class QueuedBlocks:
    """Memory behind block ids, which is written to when its turn comes."""

    def __init__(self, cache: KVCache, stream: Stream):
        self.cache, self._stream = cache, stream

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        self._stream.launch(lambda: self.cache.copy_blocks(copies))

    @property
    def shelf(self) -> np.ndarray:
        return self.cache.shelf

    def wait(self) -> None:
        self._stream.mark().wait()

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        table = list(block_ids)
        self._stream.launch(lambda: self.cache.move(table, sources, target))


@dataclass(slots=True)
class StepBuffer:
    """Buffers of the host for one step in flight; the device has done with them after ``event``."""

    words: Tensor
    sampled: SampledTokens
    damaged: Tensor
    event: Event

    def fetch(
        self, sampled: SampledTokens, num_logprobs: int, damaged: Tensor, num_tokens: int
    ) -> None:
        """Copy what a step leaves, to be launched."""
        self.sampled.answers.copy_(sampled.answers, non_blocking=True)
        self.damaged[:num_tokens].copy_(damaged[:num_tokens], non_blocking=True)
        if num_logprobs:
            self.sampled.logprobs[:num_logprobs].copy_(
                sampled.logprobs[:num_logprobs], non_blocking=True
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that become tokens together, and what they need for it, on the host."""

    rows: slice
    asked: Asked
    masks: Tensor | None = None
    edit_starts: Tensor | None = None
    edits: Tensor | None = None


def _positions(batch: Batch) -> list[int]:
    """Of the tokens that a batch samples, among those that their requests have generated. That of a
    token which is awaited counts, though its request does not know it yet."""
    positions: list[int] = []
    for item in batch.items:
        if item.num_sampled:
            first = item.end - len(item.request.prompt_token_ids)
            positions.append(first)
            if item.draft is not None:
                positions += range(first + 1, first + 1 + len(item.draft))
    return positions
