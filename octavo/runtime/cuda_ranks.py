"""The forward passes of a group of GPUs: rank 0 tells the others what it launches.

A step is staged once, as the words that a GPU takes (``cuda_inputs.py``), and all ranks upload the
same ones. Messages are int32 words that begin with their kind::

    STEP_WORDS    program, tokens, sequences, rows and longest query of the shape, whether a graph
                  is replayed, rows that get logits, number of cells; the words of the step but its
                  sampling records; its cells and their values
    LOGITS_WORDS  program, rows of the last step

Copies, moves and exits are those of ``step_words.py``. Tokens that the host does not know yet go
from rank 0's memory to the others' by the group, and so do all others; nothing else of sampling
leaves rank 0.

A rank that fails to launch a step ends the group, since others wait for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from octavo.base.errors import PeerEndedError
from octavo.kernels.cpu.group import ShmGroup
from octavo.kernels.cuda.sampling import Asked
from octavo.runtime.cuda_forward import CudaForward, SampledPart, StreamOrderedBlocks
from octavo.runtime.cuda_inputs import StagedStep, StepViews
from octavo.runtime.following_forward import Follower
from octavo.runtime.leading_forward import LeadingCache
from octavo.runtime.step_shapes import StepShape
from octavo.runtime.step_words import COPY, EXIT, BadMessage, Reader
from octavo.runtime.streams import Work

STEP_WORDS, LOGITS_WORDS = 16, 17


class _Header(NamedTuple):
    program: int
    num_tokens: int
    num_seqs: int
    num_rows: int
    max_query: int
    is_captured: int
    num_sampled: int
    num_cells: int

    @property
    def shape(self) -> StepShape:
        return StepShape(self.num_tokens, self.num_seqs, self.num_rows, self.max_query)


class LeadingCudaForward(CudaForward):
    """Rank 0 of a group.

    Args:
        messages: where its followers read.
        number: of the program in messages: 0 is the model's.
    """

    def __init__(self, *arguments: Any, messages: ShmGroup, number: int = 0, **options: Any):
        super().__init__(*arguments, **options)
        self._messages, self._number = messages, number
        self._numbers = count(number + 1)
        self.kv_cache = LeadingCache(self._blocks, messages)

    def exit_after(self, num_layers: int) -> CudaForward:
        forward = self._exit_after(num_layers, messages=self._messages, number=next(self._numbers))
        self._messages.send(array("i", [EXIT, num_layers]))
        return forward

    def _tell(
        self, staged: StagedStep, words: Tensor, captured: StepShape | None, num_sampled: int
    ) -> None:
        shape = staged.shape
        header = _Header(
            *(self._number, shape.num_tokens, shape.num_seqs, shape.num_rows, shape.max_query),
            *(int(captured is not None), num_sampled, staged.num_cells),
        )
        message = array("i", [STEP_WORDS, *header])
        own, end = words.numpy(), staged.num_words + 2 * staged.num_cells
        message.frombytes(own[: self._inputs.num_words_to_records(shape)].tobytes())
        message.frombytes(own[staged.num_words : end].tobytes())
        self._messages.send(message)

    def _tell_rows(self, rows: Sequence[int]) -> None:
        self._messages.send(array("i", [LOGITS_WORDS, self._number, *rows]))

    def _launch(self, work: Work) -> None:
        """Launch what the followers have been told. PeerEndedError if that fails."""
        try:
            self._stream.launch(work)
        except PeerEndedError:
            raise
        except Exception as error:
            self._messages.abort()
            self._group.abort()
            raise PeerEndedError(
                f"rank 0 could not launch a step that other ranks wait in: {error}"
            ) from error


class FollowingCudaForward(CudaForward):
    """A rank other than 0, which launches what it is told and samples nothing."""

    def exit_after(self, num_layers: int) -> FollowingCudaForward:
        forward = self._exit_after(num_layers)
        assert isinstance(forward, FollowingCudaForward)
        return forward

    def follow_step(self, reader: Reader) -> None:
        """Launch a step. BadMessage if it does not fit what this rank was started with."""
        header = _Header(0, *reader.take(len(_Header._fields) - 1).tolist())
        shape, inputs = header.shape, self._inputs
        self._check_shape(header)
        body = reader.take(inputs.num_words_to_records(shape))
        cells = reader.take(2 * header.num_cells)
        reader.end()
        inputs.check(shape, body, cells, self._blocks.num_blocks, self.program.vocab_size)
        buffer = self._free_buffer()
        words = buffer.words.numpy()
        staged = StagedStep(shape, inputs.num_words_of(shape), header.num_cells)
        words[: len(body)] = body
        words[len(body) : staged.num_words] = 0  # records, which nothing reads
        words[staged.num_words :][: len(cells)] = cells
        views, parts = inputs.views(shape), self._parts(header.num_sampled)
        if not header.is_captured:
            compute = self._as_launched(views, parts)
        else:
            compute = self._replayed(shape, views, parts)

        def work() -> None:
            inputs.upload(staged, buffer.words)
            compute()

        self._stream.launch(work)
        buffer.event = self._stream.mark()
        self._buffers.append(self._buffers.pop(0))

    def follow_logits(self, reader: Reader) -> None:
        """Compute this rank's logits of rows of the last step."""
        rows = reader.take(reader.num_left).tolist()
        most = self._limits.max_num_batched_tokens
        if not 0 < len(rows) <= len(self._records) or not 0 <= min(rows) <= max(rows) < most:
            raise BadMessage(f"logits of {len(rows)} rows: {len(self._records)} are the most")
        self._launch_logits(rows)

    def _replayed(self, shape: StepShape, views: StepViews, parts: list[SampledPart]) -> Work:
        assert self.graphs is not None
        if shape.is_decode:
            return self._as_replayed(self.graphs[shape], views, parts)
        return self._as_launched(views, parts, self.graphs[replace(shape, num_rows=1)])

    def _parts(self, num_sampled: int) -> list[SampledPart]:
        most = len(self._records)
        return [
            SampledPart(slice(first, min(first + most, num_sampled)), Asked())
            for first in range(0, num_sampled, most)
        ]

    def _check_shape(self, header: _Header) -> None:
        limits = self._limits
        tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        for what, value, least, most in (
            ("tokens", header.num_tokens, 1, max(tokens, seqs)),
            ("sequences", header.num_seqs, 1, seqs),
            ("rows", header.num_rows, 0, max(tokens, seqs)),
            ("tokens of a sequence", header.max_query, 1, 2 * max(tokens, seqs)),
            ("rows that get logits", header.num_sampled, 0, header.num_rows),
            ("cells", header.num_cells, 0, self._inputs.num_cells),
            ("graphs", header.is_captured, 0, 0 if self.graphs is None else 1),
        ):
            if not least <= value <= most:
                raise BadMessage(f"a step of {value} {what}: {least} to {most} are possible")

    def _choose(self, *_: Any) -> None:
        """Rank 0 samples."""

    @property
    def cache(self) -> StreamOrderedBlocks:
        return self._blocks


class CudaFollower(Follower):
    """All that a rank other than 0 computes: it obeys messages until the group ends."""

    def __init__(self, forward: FollowingCudaForward):
        super().__init__(forward)  # type: ignore[arg-type]  # whose steps have other words

    def obey(self, words: np.ndarray) -> None:
        reader = Reader(words)
        kind = reader.number("the kind of a message", COPY, LOGITS_WORDS)
        if kind not in (STEP_WORDS, LOGITS_WORDS):
            return super().obey(words)
        number = reader.number("a program", 0, len(self._forwards) - 1)
        forward = self._forwards[number]
        assert isinstance(forward, FollowingCudaForward)
        if kind == STEP_WORDS:
            forward.follow_step(reader)
        else:
            forward.follow_logits(reader)
