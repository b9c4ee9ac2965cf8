"""A GPU's memory as PyTorch reports it: its size, what code would allocate, and errors that explain
where it went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.core.batch import Batch, StepOutput
from octavo.core.executor import StepHandle
from octavo.runtime.memory_ledger import STEP, MemoryLedger, MemoryUse
from octavo.runtime.streams import HostStream

META_DEVICE = torch.device("meta")
"""PyTorch's device of tensors that have a shape and no memory."""


def device_memory(device: str) -> MemoryUse:
    """Return the memory of a GPU in use, after PyTorch has released its unused cache."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return MemoryUse(total, free, torch.cuda.memory_reserved(torch.device(device)))


def use_device(device: str) -> None:
    """Make a GPU with a number, such as ``cuda:1``, the current one of this thread: kernels are
    compiled for it, and pinned memory is allocated in its context."""
    index = torch.device(device).index
    if index is not None:
        torch.cuda.set_device(index)


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made on META_DEVICE while it is entered: the memory
    that the same code would allocate on a GPU. Views of one tensor are counted once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, Any] = {}  # storages, kept alive because they are counted by id
        self._taken = 0

    def take(self) -> int:
        """Return the bytes counted since the last call."""
        total = sum(storage.nbytes() for storage in self._seen.values())
        taken, self._taken = total - self._taken, total
        return taken

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device == META_DEVICE:
                storage = tensor.untyped_storage()
                self._seen.setdefault(storage._cdata, storage)
        return made


class MetaStream(HostStream):
    """The stream of a forward that is made to count its memory, and never runs."""

    device = META_DEVICE


@contextmanager
def explain_out_of_memory(name: str, ledger: Callable[[], MemoryLedger]) -> Iterator[None]:
    """Turn out-of-memory errors of the block into a ConfigError that lists the ledger's lines."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        wanted = str(error).partition("\n")[0].partition(". ")[0]
        raise ledger().out_of_memory(name, wanted) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether PyTorch's allocator, the driver or a library has run out of memory. The latter
    two are RuntimeErrors: "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text.lower()
        or "ALLOC_FAILED" in text
    )


def submit_explaining_memory(
    submit: Callable[[Batch], StepHandle], batch: Batch, ledger: MemoryLedger
) -> StepHandle:
    """Submit a step, and explain a lack of memory then or when its result is taken: the engine runs
    the requests of a failed step again, fewer at a time."""
    with explain_out_of_memory(STEP, lambda: ledger):
        return _ExplainingStep(submit(batch), ledger)


@dataclass(frozen=True, slots=True)
class _ExplainingStep:
    step: StepHandle
    ledger: MemoryLedger

    @property
    def ready_at(self) -> float | None:
        return self.step.ready_at

    def result(self) -> StepOutput:
        with explain_out_of_memory(STEP, lambda: self.ledger):
            return self.step.result()
