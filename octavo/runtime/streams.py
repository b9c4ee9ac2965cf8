"""Streams: queues of work that a device does in order, while the host goes on.

Host memory that queued work reads or writes must not be touched until an event marked after it has
completed: a buffer that is written or read too early gives wrong answers.
``tests/support/queued_stream.py`` tests this with a stream that defers all work as long as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], None]


class Event(Protocol):
    def wait(self) -> None:
        """Wait until all work that was queued before this event is done."""
        ...


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Captured work. Launching ``replay`` does it again with the present content of the same
    memory."""

    replay: Work
    num_bytes: int  # of device memory, held as long as the graph lives


class Stream(Protocol):
    """The queue of a device. ``captures``: replaying captured work is faster than launching it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def captures(self) -> bool: ...

    def host_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros [count] in host memory, pinned for a GPU, so that copies are asynchronous.
        The memory is not reused before launched copies from it are done, even if it is freed."""
        ...

    def catch_up(self) -> None:
        """Have later work wait for operations outside of this queue, such as zeros that were
        written and weights that were packed."""
        ...

    def launch(self, work: Work) -> None:
        """Queue the tensor operations of ``work``, which is called at once or later, in order. So
        host memory that it reads must have its content when it is launched."""
        ...

    def mark(self) -> Event: ...

    def capture(self, work: Work) -> CapturedGraph:
        """Capture ``work``, which must have been launched before, without running it. It must not
        wait, and its allocations stay in the graph."""
        ...


class HostStream:
    """The CPU, where work is done at once."""

    device = torch.device("cpu")
    captures = False

    def host_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def catch_up(self) -> None:
        pass

    def launch(self, work: Work) -> None:
        with torch.inference_mode():
            work()

    def mark(self) -> Event:
        return _FINISHED

    def capture(self, work: Work) -> CapturedGraph:
        return CapturedGraph(work, 0)


class _FinishedEvent:
    def wait(self) -> None:
        pass


_FINISHED = _FinishedEvent()


class CudaStream:
    """A CUDA stream other than the default one, on which nothing can be captured."""

    captures = True

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        # PyTorch reuses pinned memory only after copies from it are done, on the streams on which
        # they were launched.
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def catch_up(self) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self.device))

    def launch(self, work: Work) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Event:
        return _CudaEvent(self._stream.record_event())

    def capture(self, work: Work) -> CapturedGraph:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # as capturing does, so that the difference counts
        free, _ = torch.cuda.mem_get_info(self.device)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may call the driver meanwhile.
        capturing = torch.cuda.graph(graph, self._pool, self._stream, "thread_local")
        # A failed capture leaves its stream as the current one: so make it current before.
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream), capturing:
                work()
        except RuntimeError:
            # The pool may stay in the state of being captured into, and is then unusable (PyTorch's
            # CUDAGraph::capture_end, where the driver fails to end a capture).
            self._pool = torch.cuda.graph_pool_handle()
            raise
        left, _ = torch.cuda.mem_get_info(self.device)
        return CapturedGraph(graph.replay, max(0, free - left))


@dataclass(frozen=True, slots=True)
class _CudaEvent:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()
