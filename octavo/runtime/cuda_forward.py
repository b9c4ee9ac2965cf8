"""A forward pass on a GPU that the host launches asynchronously: two steps may be in flight.

The host writes the inputs of a step into a pinned buffer and queues the rest: the copy to the
device, the fused program, sampling, and the copy of tokens back to the host, which reads them after
it has launched the next step. Nothing in between synchronizes with the device. Steps of few tokens
replay a CUDA graph (``cuda_graphs.py``); others are launched kernel by kernel.

On the CPU, with the ops of ``kernels/cuda/plain_ops.py`` and a ``HostStream``, the same code runs
without kernels, for tests; its answers match those of ``eager_forward.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch, TokenLogprobs
from octavo.core.executor import Probe
from octavo.core.request import Request
from octavo.kernels.cuda.device_group import ALONE, DeviceGroup
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
from octavo.runtime.cuda_graphs import StepGraphs
from octavo.runtime.cuda_inputs import DeviceInputs, StagedStep, StepViews
from octavo.runtime.cuda_sampling import REASONS, LogprobRows, SamplingArrays, needs_host
from octavo.runtime.forward import ForwardOutput, KVBlocks, ObservedRunner, SampledRows
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.prompt_logits import LOGITS_ROWS
from octavo.runtime.sampler import compute_logprobs, probabilities
from octavo.runtime.sampling_row import DraftedRow, sampling_row
from octavo.runtime.step_shapes import StepShape, decode_shapes, prompt_shapes
from octavo.runtime.streams import Event, Stream, Work

# The sampling that graphs capture. Steps that ask for more sample again from the same logits.
_CAPTURED = Asked(cuts=True)
_NUM_BUFFERS = 2  # steps in flight


def num_logits_rows(limits: RankLimits) -> int:
    """Return how many rows get logits at once; steps with more rows sample in several parts."""
    return max(limits.max_num_seqs, LOGITS_ROWS)


def captured_shapes(limits: RankLimits, ops_per_token: float) -> list[StepShape]:
    """Return the shapes of all steps that are captured as CUDA graphs."""
    max_seqs, max_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    prompts = prompt_shapes(max_seqs, max_tokens, ops_per_token)
    return [*decode_shapes(min(max_seqs, max_tokens)), *prompts]


class StepProgram(Protocol):
    """A model's step on static buffers; see ``kernels/cuda/program.py``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def ops_per_token(self) -> float:
        """Operations of the products with weights, for each token of a step, without the head."""
        ...

    @property
    def damaged(self) -> Tensor:
        """int32 [max_tokens]: nonzero for rows of the last step with a NaN or an infinity."""
        ...

    def run(self, step: StepTensors) -> None:
        """Compute a step up to its hidden states, without the head."""
        ...

    def reset(self) -> None:
        """Reset the state that a partly launched step leaves behind."""
        ...

    def logits(self, rows: Tensor, out: Tensor) -> None:
        """Write the logits of rows (int32 [R]) of the last step to ``out``, float32 [R, V]."""
        ...

    def buffer(self, value: Value) -> Tensor:
        """Return a kept value of the last step: [max_tokens, width]."""
        ...

    def exit_after(self, num_layers: int) -> StepProgram: ...


class CudaForward:
    """Runs batches of one model by its fused program.

    Args:
        make_probe: creates the probe of the model for a runner.
        captures: capture decode steps as graphs, if the stream can.
        runs_ahead: a step may be launched before the results of the last one have arrived.
        kept: the hidden states that the program keeps, by their depth.
        group: the ranks that compute a step together, see ``cuda_ranks.py``.
        beside: another forward on the same stream, whose memory for logits and tokens this one
            shares: a step of either overwrites the results of the other.
    """

    def __init__(
        self,
        program: StepProgram,
        kv_cache: KVCache,
        sampler: DeviceSampler,
        stream: Stream,
        limits: RankLimits,
        make_probe: Callable[[ObservedRunner], Probe],
        *,
        captures: bool = True,
        runs_ahead: bool = True,
        kept: Mapping[int, Value] = MappingProxyType({}),
        group: DeviceGroup = ALONE,
        beside: CudaForward | None = None,
    ):
        self.program = program
        self.depth = _NUM_BUFFERS if runs_ahead else 1
        self._blocks = StreamOrderedBlocks(kv_cache, stream)
        self.kv_cache: KVBlocks = self._blocks
        self._group = group
        self.kernel_seconds = 0.0
        self._stream, self._sampler, self._limits = stream, sampler, limits
        self._make_probe, self._kept = make_probe, kept
        max_seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self._inputs = DeviceInputs(
            stream.device,
            max_seqs,
            limits.max_model_len,
            tokens,
            kv_cache.block_size,
            kv_cache.num_groups,
        )
        rows = num_logits_rows(limits)
        if beside is None:
            self._sampled = SampledTokens.allocate(max(max_seqs, tokens), stream.device)
            self._logits = torch.zeros(rows, program.vocab_size, device=stream.device)
        else:
            self._sampled, self._logits = beside._sampled, beside._logits
        self._records = torch.zeros(rows, RECORD_WORDS, dtype=torch.int32)
        self._arrays = SamplingArrays(self._records, program.vocab_size, stream.host_buffer)
        self._buffers = [self._create_buffer() for _ in range(_NUM_BUFFERS)]
        self._last_result_at: float | None = None
        self._num_tokens = 0  # of the last step
        self.graphs: StepGraphs | None = None
        if captures and stream.captures:
            self.graphs = StepGraphs(
                stream,
                captured_shapes(limits, program.ops_per_token),
                self._captured_step,
                program.reset,
                self._stage_padding,
                all_needed=group.size > 1,
            )
        stream.catch_up()  # with all tensors that were made so far

    def warm_up(self) -> None:
        """Compile all kernels by running steps of padding (``cuda_warmup.py``), and wait."""
        for shape in cuda_warmup.warm_up_shapes(self._limits, len(self._records)):
            views, rows = self._inputs.views(shape), slice(0, shape.num_rows)
            asked = cuda_warmup.warm_up_sampling(shape.num_rows, self.program.vocab_size)
            self._stage_padding(shape)
            self._stream.launch(
                self._as_launched(views, [SampledPart(rows, *each) for each in asked])
            )
        self._blocks.copy_blocks([(0, 0)])
        self._stream.mark().wait()

    def capture(self) -> None:
        """Capture steps of all shapes (``cuda_graphs.py``), if graphs are enabled."""
        if self.graphs is not None:
            self.graphs.capture()

    def _create_buffer(self) -> StepBuffer:
        def like(tensor: Tensor) -> Tensor:
            return self._stream.host_buffer(tensor.numel(), tensor.dtype).view(tensor.shape)

        words = self._stream.host_buffer(self._inputs.num_words, torch.int32)
        sampled = SampledTokens(like(self._sampled.answers), like(self._sampled.logprobs))
        return StepBuffer(words, sampled, like(self.program.damaged), self._stream.mark())

    @property
    def limits(self) -> RankLimits:
        return self._limits

    @property
    def feeds_tokens(self) -> bool:
        return self.depth > 1

    def feeds(self, request: Request) -> bool:
        """Return whether a step may go on from a token that the host has not received yet."""
        return needs_host(request.params) is None

    def open_loras(self, dtype: str) -> NoReturn:
        raise ConfigError(
            "adapters: the fused kernels of a GPU have none; set kernels to reference, or merge "
            "the adapter into the model"
        )

    def exit_after(self, num_layers: int) -> CudaForward:
        """See :meth:`octavo.runtime.forward.Forward.exit_after`. Only inputs take new memory."""
        return self._exit_after(num_layers)

    def _exit_after(self, num_layers: int, **options: Any) -> CudaForward:
        """Return such a forward of the same kind, with these options of its own."""
        try:
            program = self.program.exit_after(num_layers)
        except CannotFuse as error:
            raise ConfigError(f"no exit after layer {num_layers}: {error}") from error
        return type(self)(
            program,
            self._blocks.cache,
            self._sampler,
            self._stream,
            self._limits,
            self._make_probe,
            captures=False,
            runs_ahead=self.depth > 1,
            group=self._group,
            beside=self,
            **options,
        )

    def probe(self, runner: ObservedRunner) -> Probe:
        return self._make_probe(runner)

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> LaunchedStep:
        """Launch a batch. The results of all steps but the last must have been taken; tokens that
        the last one has yet to sample are fed to this one on the device."""
        captured = None if self.graphs is None else self.graphs.shape_of(batch)
        buffer = self._free_buffer()
        starts = [0, *accumulate([item.num_tokens for item in batch.items])]
        sampling = SampledRows(batch, starts, weighed)
        parts, records = self._describe(batch, sampling.requests)
        padded = captured
        if captured is not None and not captured.is_decode:
            padded = replace(captured, num_rows=len(sampling.at))
        staged = self._inputs.stage(batch, sampling.at, records, buffer.words, padded)
        views = self._inputs.views(staged.shape)
        if self.graphs is None or captured is None:
            compute = self._as_launched(views, parts)
        elif captured.is_decode:
            compute = self._as_replayed(self.graphs[captured], views, parts)
        else:
            compute = self._as_launched(views, parts, self.graphs[captured])
        num_logprobs = len(sampling.at) if any(p.asked.num_top is not None for p in parts) else 0

        def work() -> None:
            self._inputs.upload(staged, buffer.words)
            compute()
            buffer.fetch(self._sampled, num_logprobs, self.program.damaged, starts[-1])

        self._tell(staged, buffer.words, captured, len(sampling.at))
        self._launch(work)
        buffer.event = self._stream.mark()
        self._buffers.append(self._buffers.pop(0))
        self._num_tokens = starts[-1]
        return LaunchedStep(self, buffer, starts, sampling, time.perf_counter())

    def _tell(
        self, staged: StagedStep, words: Tensor, captured: StepShape | None, num_sampled: int
    ) -> None:
        """Tell other ranks of a step before it is launched."""

    def _tell_rows(self, rows: Sequence[int]) -> None:
        """Tell other ranks of rows of the last step whose logits are computed."""

    def _launch(self, work: Work) -> None:
        try:
            self._stream.launch(work)
        except Exception:  # its requests run again or fail; the next step must not be affected
            self._stream.launch(self.program.reset)
            raise

    def _free_buffer(self) -> StepBuffer:
        """Return the least recently used buffer, whose results have been taken."""
        buffer = self._buffers[0]
        buffer.event.wait()
        return buffer

    def _describe(
        self, batch: Batch, requests: Sequence[Request | DraftedRow]
    ) -> tuple[list[SampledPart], np.ndarray]:
        """Return the parts that sample together, and the sampling records, int32 [R, words]."""
        positions = _positions(batch)
        records = np.empty((len(requests), RECORD_WORDS), np.int32)
        parts: list[SampledPart] = []
        for first in range(0, len(requests), len(self._records)):
            rows = slice(first, first + len(self._records))
            own, arrays = requests[rows], self._arrays
            asked = arrays.write(own, positions[rows])
            records[rows] = self._records[: len(own)].numpy()
            parts.append(
                SampledPart(
                    slice(first, first + len(own)),
                    asked,
                    arrays.masks,
                    arrays.edit_starts,
                    arrays.edits,
                )
            )
        return parts, records

    # -- work for the device -----------------------------------------------------------------

    def _as_launched(
        self, views: StepViews, parts: Iterable[SampledPart], replay: Work | None = None
    ) -> Work:
        """Return the work of a step, kernel by kernel, or what comes before sampling by a graph."""

        def work() -> None:
            if replay is None:
                self._compute(views)
            else:
                replay()
            for part in parts:
                self._find_logits(views, part.rows)
                self._choose(views, part)

        return work

    def _as_replayed(self, replay: Work, views: StepViews, parts: Iterable[SampledPart]) -> Work:
        """Return the work of a decode step by its graph, and the sampling that graphs do not
        capture."""

        def work() -> None:
            replay()
            for part in parts:
                if part.asked._replace(cuts=True) != _CAPTURED:
                    self._choose(views, part)

        return work

    def _captured_step(self, shape: StepShape) -> Work:
        """Return the work that a graph of a shape has, on the inputs of the time when it runs."""
        views = self._inputs.views(shape)
        if not shape.is_decode:
            return lambda: self._compute(views)
        return self._as_launched(views, [SampledPart(slice(0, shape.num_seqs), _CAPTURED)])

    def _stage_padding(self, shape: StepShape) -> None:
        """Queue the inputs of a step of padding alone."""
        buffer = self._free_buffer()
        staged = self._inputs.stage_padding(shape, buffer.words)
        self._stream.launch(lambda: self._inputs.upload(staged, buffer.words))
        buffer.event = self._stream.mark()

    def _compute(self, views: StepViews) -> None:
        self._inputs.gather_tables(views)
        self._sampler.resolve(views.step.token_ids, self._inputs.last_tokens)
        self._group.share(views.step.token_ids)
        self.program.run(views.step)

    def _find_logits(self, views: StepViews, rows: slice) -> None:
        self.program.logits(views.rows[rows], self._logits[: rows.stop - rows.start])

    def _choose(self, views: StepViews, part: SampledPart) -> None:
        rows = part.rows
        masks, starts, edits = (
            each if each is None else each.to(self._stream.device, non_blocking=True)
            for each in (part.masks, part.edit_starts, part.edits)
        )
        self._sampler.sample(
            self._logits[: rows.stop - rows.start],
            SamplingTensors(
                views.records[rows],
                views.row_slots[rows],
                self._inputs.last_tokens,
                masks,
                starts,
                edits,
            ),
            part.asked,
            SampledTokens(self._sampled.answers[:, rows], self._sampled.logprobs[rows]),
        )

    # -- further results of the last step -------------------------------------------------------

    def logits(self, rows: range) -> Tensor:
        return self._logits_of(rows)

    def logprobs(self, rows: range, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        with torch.inference_mode():
            return compute_logprobs(self.logits(rows), token_ids, num_top)

    def hidden_states(self, depth: int) -> np.ndarray:
        kept = self.program.buffer(self._kept[depth])
        return kept[: self._num_tokens].float().cpu().numpy()

    def _logits_of(self, rows: Sequence[int]) -> Tensor:
        """Run the head alone over some rows of the last step, and wait."""
        self._tell_rows(rows)
        found = self._launch_logits(rows)
        self._stream.mark().wait()
        self._group.check()
        return found

    def _launch_logits(self, rows: Sequence[int]) -> Tensor:
        found = self._logits[: len(rows)]
        at = torch.tensor(rows, dtype=torch.int32)
        self._launch(lambda: self.program.logits(at.to(self._stream.device), found))
        return found

    def _probabilities(
        self, rows: Sequence[int], requests: Sequence[Request | DraftedRow]
    ) -> np.ndarray:
        """Return the distributions that rows of the last step are sampled from: float32 [R, V]."""
        found = []
        most = len(self._records)
        with torch.inference_mode():
            for first in range(0, len(rows), most):
                logits = self._logits_of(rows[first : first + most])
                own = [sampling_row(request) for request in requests[first : first + most]]
                found.append(probabilities(logits, own).cpu().numpy())
        return np.concatenate(found)

    def rows_of(self, step: LaunchedStep) -> ForwardOutput:
        """Wait for a step and return its results."""
        buffer, sampling = step.buffer, step.sampling
        buffer.event.wait()
        self._group.check()
        now, begun = time.perf_counter(), step.begun_at
        self.kernel_seconds += now - max(begun, self._last_result_at or begun)
        self._last_result_at = now
        count = len(sampling.at)
        damaged = buffer.damaged[: step.starts[-1]].numpy().nonzero()[0].tolist()
        rows = ForwardOutput(step.starts, damaged)
        token_ids, status = buffer.sampled.answers[:, :count].tolist()
        logprob_rows = LogprobRows(buffer.sampled.logprobs.numpy(), self.program.vocab_size)
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
    """A launched step; see ``PendingForward``."""

    forward: CudaForward
    buffer: StepBuffer
    starts: list[int]
    sampling: SampledRows
    begun_at: float

    def result(self) -> ForwardOutput:
        return self.forward.rows_of(self)


class StreamOrderedBlocks:
    """A KV cache whose copies are queued on a stream, in order with the steps."""

    def __init__(self, cache: KVCache, stream: Stream):
        self.cache, self._stream = cache, stream

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        self._stream.launch(lambda: self.cache.copy_blocks(copies))

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def host_blocks(self) -> np.ndarray:
        return self.cache.host_blocks

    def wait(self) -> None:
        self._stream.mark().wait()

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        table = list(block_ids)
        self._stream.launch(lambda: self.cache.move(table, sources, target))


@dataclass(slots=True)
class StepBuffer:
    """Host buffers of one step in flight; the device is done with them after ``event``."""

    words: Tensor
    sampled: SampledTokens
    damaged: Tensor
    event: Event

    def fetch(
        self, sampled: SampledTokens, num_logprobs: int, damaged: Tensor, num_tokens: int
    ) -> None:
        """Copy the results of a step to the host. To be launched on the stream."""
        self.sampled.answers.copy_(sampled.answers, non_blocking=True)
        self.damaged[:num_tokens].copy_(damaged[:num_tokens], non_blocking=True)
        if num_logprobs:
            self.sampled.logprobs[:num_logprobs].copy_(
                sampled.logprobs[:num_logprobs], non_blocking=True
            )


@dataclass(frozen=True, slots=True)
class SampledPart:
    """Rows that are sampled together, and the inputs of their sampling on the host."""

    rows: slice
    asked: Asked
    masks: Tensor | None = None
    edit_starts: Tensor | None = None
    edits: Tensor | None = None


def _positions(batch: Batch) -> list[int]:
    """Return the position of each sampled token of a batch in its request's output, counting a
    token that is still awaited."""
    positions: list[int] = []
    for item in batch.items:
        if item.num_sampled:
            first = item.end - len(item.request.prompt_token_ids)
            positions.append(first)
            if item.draft is not None:
                positions += range(first + 1, first + 1 + len(item.draft))
    return positions
