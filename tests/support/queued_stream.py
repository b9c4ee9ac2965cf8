"""A stream that does nothing before it has to, so that a buffer that is written or read too early
is a wrong answer, as it would be now and then on a GPU."""

from __future__ import annotations

from collections import deque

import torch

from octavo.runtime.streams import CapturedGraph, Event, Work


class QueuedStream:
    """Runs what is queued when an event after it is waited for. A graph is the work itself, done
    again; like a captured one it computes nothing when it is captured.

    Args:
        captures: as in ``Stream``.
    """

    device = torch.device("cpu")

    def __init__(self, captures: bool = True):
        self.captures = captures
        self.num_replays = 0
        self._num_done = 0
        self._queue: deque[Work] = deque()

    def host_buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def catch_up(self) -> None:
        pass

    def launch(self, work: Work) -> None:
        self._queue.append(work)

    def mark(self) -> Event:
        return _Mark(self, len(self._queue) + self._num_done)

    def capture(self, work: Work) -> CapturedGraph:
        def replay() -> None:
            self.num_replays += 1
            work()

        return CapturedGraph(replay, 1)

    def advance(self, count: int) -> None:
        """Do what is queued until ``count`` pieces of work have been done, of all."""
        with torch.inference_mode():
            while self._num_done < count:
                self._num_done += 1
                self._queue.popleft()()


class _Mark:
    def __init__(self, stream: QueuedStream, count: int):
        self._stream, self._count = stream, count

    def wait(self) -> None:
        self._stream.advance(self._count)
