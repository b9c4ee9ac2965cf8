"""A GPU's memory as PyTorch has it: what there is, what something would allocate, and what is said
when there is no more."""

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
"""Tensors here have a shape, and no memory."""


def device_memory(device: str) -> MemoryUse:
    """That of a GPU, once our allocator has given back what it does not use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return MemoryUse(total, free, torch.cuda.memory_reserved(torch.device(device)))


def use_device(device: str) -> None:
    """Make a GPU that is named by its number the current one of this thread: kernels are compiled
    for it, and pinned memory is made in its context. Steps say themselves on which GPU they run."""
    index = torch.device(device).index
    if index is not None:
        torch.cuda.set_device(index)


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made NOWHERE while it is entered: what the same code
    would allocate elsewhere. Several views of one tensor are counted once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, Any] = {}  # storages, which stay as long as they are counted by id
        self._taken = 0

    def take(self) -> int:
        """Bytes since the last call."""
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
    """For what is made to be counted, and never run."""

    device = META_DEVICE


@contextmanager
def explain_out_of_memory(name: str, ledger: Callable[[], MemoryLedger]) -> Iterator[None]:
    """Has a GPU without memory for ``name``, a line, answer with a ConfigError by its ledger."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        wanted = str(error).partition("\n")[0].partition(". ")[0]
        raise ledger().out_of_memory(name, wanted) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Of PyTorch's allocator; or of the driver or a library, which Triton and PyTorch pass on as
    RuntimeErrors with a text: "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text.lower()
        or "ALLOC_FAILED" in text
    )


def submit_explaining_memory(
    submit: Callable[[Batch], StepHandle], batch: Batch, ledger: MemoryLedger
) -> StepHandle:
    """A step under way, whose lack of memory is told likewise, then or when its result is asked
    for: the requests of a step that raised are run again, fewer at a time."""
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
