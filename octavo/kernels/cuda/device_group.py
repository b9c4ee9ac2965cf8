"""Sums and exchanges of tensors between the ranks of a group, each of which has a device.

`Alone` is a rank without others. `NcclGroup` is one of several: NCCL between GPUs, gloo between
tensors of processors. Both come with PyTorch. Ranks call the same operations in the same order;
NCCL only queues them on the current stream, and they may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.base.errors import ConfigError, PeerEndedError

# How long a rank may keep others waiting while all start, and after that.
_SECONDS_TO_MEET = 600.0


class DeviceGroup(Protocol):
    """The ranks that compute a step together. ``rank`` is this one's, 0 has the logits."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> None:
        """Replace a tensor by the sum of those of all ranks, which is the same in all of them. The
        order of the sum is not fixed."""
        ...

    def gather_everywhere(self, x: Tensor, out: Tensor) -> None:
        """Write the tensors of all ranks to ``out`` [ranks, ...], which all get."""
        ...

    def gather(self, x: Tensor, out: Tensor) -> bool:
        """Write the tensors of all ranks to ``out`` [ranks, ...] of rank 0, of which ``x`` is a
        place already; return whether this is that rank. Others need no ``out``."""
        ...

    def share(self, x: Tensor) -> None:
        """Replace a tensor by that of rank 0."""
        ...

    def check(self) -> None:
        """PeerEndedError if the group was aborted: what was computed since may be anything."""
        ...

    def abort(self) -> None:
        """End all waiting here for ever. May be called from any thread, and repeated."""
        ...


class Alone:
    """A rank without others."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> None:
        pass

    def gather_everywhere(self, x: Tensor, out: Tensor) -> None:
        out[0].copy_(x)

    def gather(self, x: Tensor, out: Tensor) -> bool:
        return True

    def share(self, x: Tensor) -> None:
        pass

    def check(self) -> None:
        pass

    def abort(self) -> None:
        pass


ALONE = Alone()


class NcclGroup:
    """One of several ranks, by a process group of PyTorch that is no other code's.

    Tensors are contiguous. ``num_bytes`` counts the bytes of the tensors of each operation, by its
    name: what a rank gives.

    Args:
        store: where ranks find each other. Numbers and addresses go through it, no objects.
        device: of this rank, and no other's.

    Raises:
        ConfigError: not all ranks came within ten minutes, or PyTorch lacks what it needs.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device):
        self.rank, self.size, self._device = rank, size, device
        self.num_bytes: dict[str, int] = {}
        self._has_ended = False
        try:
            self._group = (
                _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size)
            )
        except RuntimeError as error:
            raise ConfigError(
                f"rank {rank} of {size} does not find the others: {_first_line(error)}"
            ) from error

    def sum(self, x: Tensor) -> None:
        self._count("sum", x)
        self._meet(lambda: self._group.allreduce([x]))

    def gather_everywhere(self, x: Tensor, out: Tensor) -> None:
        self._count("gather_everywhere", x)
        self._meet(lambda: self._group._allgather_base(out.view(-1, *x.shape[1:]), x))

    def gather(self, x: Tensor, out: Tensor) -> bool:
        self._count("gather", x)
        options = dist.GatherOptions()
        options.rootRank = 0
        is_root = self.rank == 0
        received = [list(out)] if is_root else []
        self._meet(lambda: self._group.gather(received, [x], options))
        return is_root

    def share(self, x: Tensor) -> None:
        self._count("share", x)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._meet(lambda: self._group.broadcast([x], options))

    def abort(self) -> None:
        self._has_ended = True
        with suppress(RuntimeError):
            self._group.abort()

    def check(self) -> None:
        if self._has_ended:
            raise PeerEndedError("another rank of the group has ended")

    def _meet(self, begin: Callable[[], dist.Work]) -> None:
        self.check()
        try:
            begin().wait()
        except RuntimeError as error:
            self.abort()
            raise PeerEndedError(f"another rank has ended: {_first_line(error)}") from error

    def _count(self, name: str, x: Tensor) -> None:
        self.num_bytes[name] = self.num_bytes.get(name, 0) + x.nbytes


def add_in_pairs(terms: Sequence[Tensor]) -> Tensor:
    """Add up tensors, a power of two, as a binary tree of neighbours; into the first of each pair.
    So what several ranks have added up of neighbouring terms is a branch of the same tree."""
    while len(terms) > 1:
        terms = [first.add_(second) for first, second in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


# Any: the types of PyTorch do not say that these are process groups.
def _gloo(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_SECONDS_TO_MEET)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("this build of PyTorch has no NCCL, which ranks on GPUs need")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_SECONDS_TO_MEET)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
