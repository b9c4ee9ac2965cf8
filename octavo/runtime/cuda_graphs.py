"""CUDA graphs of decode steps, each of which is launched as one.

A graph has a size, the number of its sequences with one token each; a smaller step is padded to it.
Sizes are close together, so that little is computed for padding::

    1  2  4  8  16  32  48 ... max_num_seqs, at most 256

All sizes are captured at the start, before any request waits for a token: a capture synchronizes
the device and frees cached memory, which would delay running requests. The largest comes first, so
that the smaller ones reuse its memory. Other steps (chunks of prompts, drafts, more sequences) are
launched kernel by kernel, and so are those for which no graph that is large enough was captured.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.core.batch import Batch
from octavo.runtime.memory_ledger import gib

if TYPE_CHECKING:
    from octavo.runtime.streams import CapturedGraph, Stream, Work

MAX_SIZE = 256
_STEP = 16

_log = logging.getLogger("octavo")


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes to capture, ascending up to ``max_num_seqs``, at most 256."""
    most = min(max_num_seqs, MAX_SIZE)
    return sorted({most, *(n for n in (1, 2, 4, 8, *range(_STEP, most, _STEP)) if n < most)})


def is_plain_decode(batch: Batch) -> bool:
    """Return whether a step computes and samples one token of each request."""
    return all(item.num_tokens == item.num_sampled == 1 for item in batch.items)


class DecodeGraphs:
    """Captures decode steps, and chooses the graph for a batch.

    Args:
        step_of: returns the work of a decode step of a size.
        reset: resets the state that a partly launched step leaves behind.
        idle: writes inputs of padding, so that the work can run once before it is captured:
            kernels are compiled then, and libraries allocate their memory.
    """

    def __init__(
        self,
        stream: Stream,
        max_num_seqs: int,
        step_of: Callable[[int], Work],
        reset: Work,
        idle: Callable[[int], None],
    ):
        self._stream = stream
        self._step_of, self._reset, self._idle = step_of, reset, idle
        self._missing = graph_sizes(max_num_seqs)
        self._sizes: list[int] = []  # that are captured, ascending
        self._graphs: dict[int, CapturedGraph] = {}

    @property
    def bytes_by_size(self) -> dict[int, int]:
        """The device memory of each captured graph, in bytes by size, the largest first."""
        return {size: graph.num_bytes for size, graph in self._graphs.items()}

    def size_of(self, batch: Batch) -> int | None:
        """Return the size of the smallest graph that a batch fits in, None if there is none."""
        if not self._sizes or batch.num_seqs > self._sizes[-1] or not is_plain_decode(batch):
            return None
        return self._sizes[bisect_left(self._sizes, batch.num_seqs)]

    def __getitem__(self, size: int) -> Work:
        return self._graphs[size].replay

    def capture(self) -> None:
        """Capture every size, the largest first."""
        if not self._missing:
            return
        begin = time.perf_counter()
        while self._missing:
            self._capture(self._missing.pop())
        _log.info(
            "%d decode steps are captured after %.1f s, in %s",
            *(len(self._sizes), time.perf_counter() - begin),
            gib(sum(self.bytes_by_size.values())),
        )

    def _capture(self, size: int) -> None:
        step = self._step_of(size)
        try:
            self._idle(size)
            self._stream.launch(step)
            graph = self._stream.capture(step)
        except RuntimeError as error:  # PyTorch, Triton and the driver raise this
            # It is not tried again: each try would take time, and fail in the same way.
            _log.warning("decode steps of %d requests are not captured: %s", size, error)
            self._stream.launch(self._reset)
        else:
            self._graphs[size] = graph
            self._sizes.insert(0, size)
            _log.debug("captured a step of %d tokens, %d bytes", size, graph.num_bytes)
