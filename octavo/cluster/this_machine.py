"""`ThisMachine` places processes on this machine, at once, and reserves nothing."""

from __future__ import annotations

from octavo.cluster.placement import Bundle, Waiting
from octavo.cluster.process_host import ProcessHost
from octavo.system import machine


class LocalLease:
    """A place on this machine."""

    def __init__(self, num_alike: int) -> None:
        self.num_alike = num_alike
        self._host: ProcessHost | None = None

    def new_host(self) -> ProcessHost:
        self.release()
        self._host = ProcessHost()
        return self._host

    def release(self) -> None:
        if self._host is not None:
            self._host.kill()


class ThisMachine:
    """The placement where there is no other; see `placement.Placement`."""

    address = "127.0.0.1"
    num_released = 0

    def __init__(self) -> None:
        self.num_gpus = machine.num_gpus()
        self._leases: list[LocalLease] = []

    def cpus_for(self, num_processes: int) -> int:
        return max(1, machine.cpu().usable_cores // num_processes)

    def lease(self, name: str, bundle: Bundle, waiting: Waiting) -> LocalLease:
        cores = machine.cpu().usable_cores
        self._leases.append(LocalLease(max(1, cores // max(1, bundle.num_cpus))))
        return self._leases[-1]

    def close(self) -> None:
        for lease in self._leases:
            lease.release()
