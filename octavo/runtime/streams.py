"""Work that is queued on a device and done there in the order in which it was queued.

Whoever queues goes on at once. So memory of the host that work reads or writes is the work's own
until an event that was marked after it has come: a buffer that is written too early, or read too
early, is a wrong answer. ``tests/support/queued_stream.py`` is a stream that puts this to the test:
it does nothing before it has to.
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
        """Until all that was queued before this event is done."""
        ...


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Work that was captured. ``replay``, launched, does it again: in the same memory, whatever is
    in there by then, and with nothing left to decide."""

    replay: Work
    num_bytes: int  # of the device's memory, which it holds as long as it lives


class Stream(Protocol):
    """The queue of a device. ``captures``: whether to replay work is any faster than to do it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def captures(self) -> bool: ...

    def host_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros [count] of the host's memory, which copies to and from the device need not wait
        for: pinned, where the device is a GPU. Copies from it that were launched find it as it was,
        even if nobody refers to it any more."""
        ...

    def catch_up(self) -> None:
        """Have what is launched from now on wait for what has been done to tensors outside of this
        queue: zeros that were written, weights that were packed."""
        ...

    def launch(self, work: Work) -> None:
        """Queue what ``work`` does to tensors. It may be called at once or later, but not after
        work that is launched later; so what it reads of the host's is settled when it is launched.
        """
        ...

    def mark(self) -> Event: ...

    def capture(self, work: Work) -> CapturedGraph:
        """Capture ``work``, which must have been launched before, in its present shape: it waits
        for nothing, and allocates nothing that others see. Nothing is computed by this."""
        ...


class HostStream:
    """The CPU, which does everything at once."""

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
        return _PAST

    def capture(self, work: Work) -> CapturedGraph:
        return CapturedGraph(work, 0)


class _Past:
    def wait(self) -> None:
        pass


_PAST = _Past()


class CudaStream:
    """A stream of a GPU's own, beside the default one, on which nothing can be captured."""

    captures = True

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        # PyTorch gives such memory to others only when copies from it have been done, in the
        # streams in which they were launched.
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
        torch.cuda.empty_cache()  # as capturing does: what is free by then counts
        free, _ = torch.cuda.mem_get_info(self.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the driver for what they like meanwhile.
        capturing = torch.cuda.graph(graph, self._pool, self._stream, "thread_local")
        # A capture that fails leaves its stream behind as the current one: so it is that before.
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream), capturing:
                work()
        except RuntimeError:
            # Its pool may be left as one that is still captured into, and then is good for nothing
            # more (PyTorch's CUDAGraph::capture_end, where the driver refuses to end a capture).
            self._pool = torch.cuda.graph_pool_handle()
            raise
        left, _ = torch.cuda.mem_get_info(self.device)
        return CapturedGraph(graph.replay, max(0, free - left))


@dataclass(frozen=True, slots=True)
class _CudaEvent:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()
