"""Placements have places for processes, and start them there.

    placement = ThisMachine() or RayPlacement(...)
    lease = placement.lease("replica-0", Bundle(num_cpus=4), waiting)   waits for the place
    lease.host.start(spec)                                              a child of the host
    lease.host.end_of_process(10)                                       how it ended
    lease.release()

A placement is not on the path of any step: processes that it has started talk to each other
directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

Waiting = Callable[[str], None]
"""A callback that gets the words for what a lease waits for."""


class Bundle(NamedTuple):
    """The needs of one process, all on one machine."""

    num_cpus: int
    num_gpus: int = 0

    def __str__(self) -> str:
        parts = [count(self.num_cpus, "CPU")] if self.num_cpus else []
        parts += [count(self.num_gpus, "GPU")] if self.num_gpus else []
        return " and ".join(parts) or "nothing"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start: ``python -m MODULE FD WORDS...``.

    It gets a descriptor of memory that outlives it, and ``secret`` as the first line of its
    standard input, which ends when its host does: then it has to end too.

    Args:
        memory_bytes: of that memory.
        version: of octavo, which must be that of the host.
    """

    module: str
    words: tuple[str, ...]
    secret: str = field(repr=False)
    memory_bytes: int
    version: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> ProcessSpec:
        return cls(**{**fields, "words": tuple(fields["words"])})


class ProcessEnd(NamedTuple):
    """The end of a process: how it came, in words, and the bytes of its memory."""

    status: str
    memory: bytes = b""


class Host(Protocol):
    """A place for one process, which ends when its host does."""

    def start(self, spec: ProcessSpec) -> None:
        """Start the process. EngineError if that cannot be, and says why."""
        ...

    def kill(self, signum: int) -> None:
        """Send a signal to the process, if it runs."""
        ...

    def end_of_process(self, seconds: float) -> ProcessEnd | None:
        """Wait for the end of the process; None if it still runs after so many seconds."""
        ...


class Lease(Protocol):
    """A place that is held until it is released.

    ``num_alike``: how many such places its whole machine has, taken ones too; 1 at least.
    """

    num_alike: int

    def new_host(self) -> Host:
        """Return a host in this place, and end the one before, with its process.

        Raises:
            EngineError: the place is gone, or no host can be started there.
        """
        ...

    def release(self) -> None:
        """End what runs there, and give the place back. May be repeated."""
        ...


class Placement(Protocol):
    """Has places, on one machine or on many.

    ``address`` is where processes that it places reach this one. ``num_released``: leases of an
    earlier server of the same name, which had gone without releasing them. ``num_gpus``: of all
    machines.
    """

    address: str
    num_released: int
    num_gpus: int

    def cpus_for(self, num_processes: int) -> int:
        """Return the CPUs of each of so many processes that share all there are: 1 at least."""
        ...

    def lease(self, name: str, bundle: Bundle, waiting: Waiting) -> Lease:
        """Wait for a place. EngineError if there was none in the time that was set."""
        ...

    def close(self) -> None:
        """Release all leases."""
        ...


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 CPU``, ``2 CPUs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
