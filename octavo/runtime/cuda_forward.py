"""A forward pass on a GPU, which the host only launches: two steps may be in flight.

Of a step the host writes the inputs into a buffer of its own and queues the rest: the copy, the
fused program, the choice of tokens, and the copy of these back to the host, which looks at them
when it has launched the next step. Nothing on the way asks the device anything. A step of plain
decoding is one graph, replayed; any other is launched kernel by kernel.

On the CPU, with the ops of ``kernels/cuda/plain_ops.py`` and a ``HostStream``, this is the slow twin
of that: the same code but for the kernels, and answers like those of ``eager_forward.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.core.batch import Batch, TokenLogprobs
from octavo.core.executor import Probe
from octavo.core.request import Request
from octavo.errors import ConfigError
from octavo.kernels.cuda.ops import StepTensors
from octavo.kernels.cuda.sampling import (
    HAS_TOKEN,
    JUDGED_WORDS,
    RECORD_WORDS,
    Asked,
    DeviceSampler,
    SampledTokens,
    SamplingTensors,
)
from octavo.kernels.fusion import CannotFuse
from octavo.kernels.recorder import Value
from octavo.runtime.capacity import RankLimits
from octavo.runtime.cuda_graphs import DecodeGraphs
from octavo.runtime.cuda_inputs import DeviceInputs, StagedStep, StepShape, StepViews
from octavo.runtime.cuda_sampling import REASONS, JudgedRows, SamplingArrays, needs_host
from octavo.runtime.forward import Observed, Rows, SampledRows
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.prompt_logits import LOGITS_ROWS
from octavo.runtime.sampler import compute_logprobs, probabilities
from octavo.runtime.sampling_row import sampling_row
from octavo.runtime.streams import Stream, Work

# What a graph samples for. Rows that ask for more are sampled again, from the same logits.
_CAPTURED = Asked(cuts=True)


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
        kept: the values that the program keeps, by their depth.
    """

    depth = 2

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
        kept: Mapping[int, Value] = MappingProxyType({}),
    ):
        self.program = program
        self.kv_cache = QueuedBlocks(kv_cache, stream)
        self.kernel_seconds = 0.0
        self._sampler, self._stream, self._limits = sampler, stream, limits
        self._make_probe, self._kept = make_probe, kept
        seats, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self._inputs = DeviceInputs(
            stream.device, seats, limits.max_model_len, tokens, kv_cache.block_size
        )
        self._sampled = SampledTokens.allocate(max(seats, tokens), stream.device)
        rows = max(seats, LOGITS_ROWS)  # more than that, of drafts, come in pieces
        self._logits = torch.zeros(rows, program.vocab_size, device=stream.device)
        self._records = np.zeros((rows, RECORD_WORDS), np.int32)
        self._arrays = SamplingArrays(self._records, program.vocab_size)
        self._lanes = [_Lane.allocate(stream, self._inputs, self._sampled) for _ in range(2)]
        self._num_launched = self._num_ended = 0
        self._last_end = 0.0
        self._last_rows: list[int] = [0]  # where those of the last step begin
        self.graphs: DecodeGraphs | None = None
        if captures and stream.captures:
            self.graphs = DecodeGraphs(stream, seats, self._decode, self._idle)

    def feeds(self, request: Request) -> bool:
        """Whether steps may go on from tokens of a request that the host has not seen."""
        return needs_host(request.params) is None

    def exit_after(self, num_layers: int) -> CudaForward:
        """As :meth:`octavo.runtime.forward.Forward.exit_after`."""
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
        )

    def probe(self, runner: Observed) -> Probe:
        return self._make_probe(runner)

    def run(self, batch: Batch, weighed: Collection[str] = ()) -> Rows:
        return self.submit(batch, weighed).result()

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> LaunchedStep:
        """Launch a batch. Results of the step before the last one have been taken by then."""
        graphs, size = self.graphs, None
        if graphs is not None:
            if self._num_ended:
                graphs.capture_next()
            size = graphs.size_of(batch)
        lane = self._next_lane()
        starts = [0, *accumulate([item.num_tokens for item in batch.items])]
        sampling = SampledRows(batch, starts, weighed)
        records = np.empty((len(sampling.at), RECORD_WORDS), np.int32)
        pieces = list(self._describe(sampling.requests, _positions(batch), records))
        padded = None if size is None else StepShape.decode(size)
        staged = self._inputs.stage(batch, sampling.at, records, lane.inputs, padded)
        captured = graphs[size] if graphs is not None and size is not None else None
        self._launch(lane, staged, pieces, captured)
        self._last_rows = starts
        return LaunchedStep(self, batch, lane, starts, sampling, time.perf_counter())

    def _next_lane(self) -> _Lane:
        """Buffers of the host that the device has done with."""
        lane = self._lanes[self._num_launched % len(self._lanes)]
        self._num_launched += 1
        lane.event.wait()
        return lane

    def _describe(
        self, requests: Sequence[Request], positions: Sequence[int], records: np.ndarray
    ) -> Iterator[_Piece]:
        """Say how rows become tokens: into ``records``, and with what else they need."""
        most = len(self._records)
        for first in range(0, len(requests), most):
            rows = requests[first : first + most]
            end = first + len(rows)
            asked = self._arrays.write(rows, positions[first:end])
            records[first:end] = self._records[: len(rows)]
            yield _Piece(slice(first, end), asked, *map(_own, self._arrays.extras()))

    # -- what the device does ----------------------------------------------------------------

    def _launch(
        self, lane: _Lane, staged: StagedStep, pieces: list[_Piece], captured: Work | None
    ) -> None:
        views = self._inputs.views(staged.shape)
        num_top = [piece.asked.num_top for piece in pieces]

        def work() -> None:
            self._inputs.upload(staged, lane.inputs)
            if captured is not None:
                captured()
                for piece in pieces:
                    if piece.asked > _CAPTURED or piece.asked.num_top is not None:
                        self._choose(views, piece)
            else:
                self._compute(views)
                for piece in pieces:
                    self._find_logits(views, piece.rows)
                    self._choose(views, piece)
            lane.take(self._sampled, self.program.damaged, judged=any(n is not None for n in num_top))

        self._stream.launch(work)
        lane.event = self._stream.mark()

    def _decode(self, size: int) -> Work:
        """The work of a decode step of a size, which its inputs alone tell from others."""
        views = self._inputs.views(StepShape.decode(size))
        piece = _Piece(slice(0, size), _CAPTURED)

        def work() -> None:
            self._compute(views)
            self._find_logits(views, piece.rows)
            self._choose(views, piece)

        return work

    def _idle(self, size: int) -> None:
        """Queue the inputs of a decode step of nobody."""
        lane = self._next_lane()
        staged = self._inputs.stage_nothing(StepShape.decode(size), lane.inputs)
        self._stream.launch(lambda: self._inputs.upload(staged, lane.inputs))
        lane.event = self._stream.mark()
