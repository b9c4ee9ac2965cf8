"""Decode steps that were captured, and are launched as one.

A captured step has a size, and computes as many tokens, one of each sequence; a step of fewer is
filled up with those of nobody. Sizes are close enough together that little is computed for nobody::

    1  2  4  8  16  32  48 ... the most that run at once, at most 256

All sizes are captured at the start, before anybody waits for a token: a capture stops the device
and gives memory back to it, which would delay the tokens of whoever is being answered. The largest
comes first, so that the memory that it needs serves the others too. What is no plain decode step
(chunks of prompts, drafts, more sequences than that) is launched kernel by kernel. So are steps for
which no graph could be captured, where no other one is large enough.
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
    """The sizes that are captured, ascending; the last one is ``max_num_seqs``, up to 256."""
    most = min(max_num_seqs, MAX_SIZE)
    return sorted({most, *(n for n in (1, 2, 4, 8, *range(_STEP, most, _STEP)) if n < most)})


def is_plain_decode(batch: Batch) -> bool:
    """Whether each request of a step has one token computed, and gets one."""
    return all(item.num_tokens == item.num_sampled == 1 for item in batch.items)


class DecodeGraphs:
    """Captures decode steps, and knows which one a batch is launched as.

    Args:
        step_of: the work of a decode step of a size.
        reset: undoes what a step leaves behind of which not all was launched.
        idle: puts an empty step in place of the inputs, for that work to be launched once before it
            is captured: kernels are compiled, and libraries take what memory they need.
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
        """What the device holds for each graph that is captured, the largest first."""
        return {size: graph.num_bytes for size, graph in self._graphs.items()}

    def size_of(self, batch: Batch) -> int | None:
        """The size of the graph that a batch fits best; None if it fits none."""
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
        except RuntimeError as error:  # of PyTorch, of Triton, of what they call
            # It is not tried again: each try would cost time, and say the same.
            _log.warning("decode steps of %d requests are not captured: %s", size, error)
            self._stream.launch(self._reset)
        else:
            self._graphs[size] = graph
            self._sizes.insert(0, size)
            _log.debug("captured a step of %d tokens, %d bytes", size, graph.num_bytes)
