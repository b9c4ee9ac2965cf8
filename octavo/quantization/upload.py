"""Uploads weights to a device through pinned buffers, with one copy on the host.

The copy engine of a GPU reads pinned memory only; of other memory the driver makes a copy first,
and waits for it. So bytes of mapped files go through two pinned buffers: while the device reads
one, the host fills the other. Types are converted on the device, a chunk at a time.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20


class Upload(Protocol):
    """A function that uploads uint8 ``data``, numbers of type ``of``, as a tensor of type ``to``.

    The tensor is flat if the types differ, and has the shape of ``data`` if both are uint8.
    """

    def __call__(self, data: np.ndarray, of: torch.dtype, to: torch.dtype) -> Tensor: ...


class Mark(Protocol):
    """A point in a queue of copies."""

    def wait(self) -> None:
        """Wait until all earlier copies are done."""
        ...


class CopyQueue(Protocol):
    """Copies to a device, made in order while the host goes on."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate pinned host memory, uint8."""
        ...

    def empty(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """Allocate device memory."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy ``source`` [n], on the host or the device, to ``target`` [n] on the device, and
        convert its type. Neither may change before a later mark."""
        ...

    def mark(self) -> Mark: ...


class CudaQueue:
    """Copies in the current stream of a GPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, num_values: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_values, dtype=dtype, device=self._device)

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _Event(event)


class _Event:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class ChunkedUpload:
    """An ``Upload`` through two pinned buffers of ``chunk_bytes`` that it owns."""

    def __init__(self, queue: CopyQueue, chunk_bytes: int = CHUNK_BYTES):
        self._queue, self._chunk_bytes = queue, chunk_bytes
        self._buffers = [queue.pinned(chunk_bytes) for _ in range(2)]
        self._marks: list[Mark | None] = [None, None]  # after the last copy from each buffer
        self._staging: Tensor | None = None  # on the device, for conversions

    def __call__(self, data: np.ndarray, of: torch.dtype, to: torch.dtype) -> Tensor:
        flat = torch.from_numpy(data).reshape(-1)
        made = self._queue.empty(len(flat) // of.itemsize, to)
        for start in range(0, len(flat), self._chunk_bytes):
            chunk = self._fill(flat[start : start + self._chunk_bytes])
            target = made[start // of.itemsize :][: len(chunk) // of.itemsize]
            if of == to:
                self._queue.copy(chunk, target.view(torch.uint8))
            else:
                self._convert(chunk, of, target)
            self._marks[0] = self._queue.mark()
            self._turn()
        return made if of != torch.uint8 else made.view(data.shape)

    def tensor(self, values: Tensor) -> Tensor:
        """Upload a tensor of the host, contiguous on the device; ``values`` may be freed as soon as
        this returns."""
        made = self(values.reshape(-1).view(torch.uint8).numpy(), values.dtype, values.dtype)
        return made.view(values.shape)

    def _fill(self, part: Tensor) -> Tensor:
        """Copy ``part`` to the next buffer, once the device has read its previous contents."""
        if (mark := self._marks[0]) is not None:
            mark.wait()
        chunk = self._buffers[0][: len(part)]
        chunk.copy_(part)
        return chunk

    def _convert(self, chunk: Tensor, of: torch.dtype, target: Tensor) -> None:
        if self._staging is None:
            self._staging = self._queue.empty(self._chunk_bytes, torch.uint8)
        staged = self._staging[: len(chunk)]
        self._queue.copy(chunk, staged)
        self._queue.copy(staged.view(of), target)

    def _turn(self) -> None:
        self._buffers.reverse()
        self._marks.reverse()


def upload_at_once(device: torch.device) -> Upload:
    """A simple ``Upload`` for any device."""

    def upload(data: np.ndarray, of: torch.dtype, to: torch.dtype) -> Tensor:
        return torch.from_numpy(data).view(of).to(device, to)

    return upload


def upload_to(device: torch.device) -> Upload:
    """The fastest ``Upload`` for a device other than the CPU."""
    return ChunkedUpload(CudaQueue(device)) if device.type == "cuda" else upload_at_once(device)
