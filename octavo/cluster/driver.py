"""The process that has a placement for a server: ray stays out of the server's own process, which
so outlives whatever happens to a cluster.

    python -m octavo.cluster.driver FD

``FD`` is one end of a socket pair. Each message is a line of JSON; requests have a number, which
their answer has too, and several may be under way:

    {"id": 1, "op": "open", "kind", "settings",     {"id": 1, "address", "num_released",
     "num_processes"}                                "num_gpus", "cpus": of each process}
    {"op": "lease", "name", "cpus", "gpus"}         {"id", "num_alike"}
                                                    {"waiting": TEXT}, in between, without a number
    {"op": "start", "name", "spec"}                 {"id"}
    {"op": "kill", "name", "signum"}                {"id"}
    {"op": "end", "name", "seconds"}                {"id", "status", "memory"}, null while it runs
    {"op": "release", "name"}                       {"id"}

An answer with "error" has its text, and "kind": config or engine. At the end of the connection all
leases are released.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from octavo.base.errors import ConfigError, EngineError, OctavoError
from octavo.cluster.placement import Bundle, Host, Lease, Placement, ProcessSpec

# Leases that may wait at once, with what else is asked meanwhile.
_MOST_THREADS = 256
_CLOSING_SECONDS = 15.0


def open_placement(kind: str, settings: dict[str, Any]) -> Placement:
    """Return the placement of this name. ConfigError if it cannot be opened."""
    if kind == "ray":
        from octavo.cluster.ray_placement import RayPlacement

        return RayPlacement(**settings)
    if kind == "this_machine":
        from octavo.cluster.this_machine import ThisMachine

        return ThisMachine()
    raise ConfigError(f"there is no placement called {kind!r}")


class Driver:
    """Does what a server asks for by messages."""

    def __init__(self, connection: socket.socket):
        self._lines = connection.makefile("r", encoding="utf-8", newline="\n")
        self._connection = connection
        self._sending = threading.Lock()
        self._placement: Placement | None = None
        self._leases: dict[str, Lease] = {}
        self._hosts: dict[str, Host] = {}
        self._released: set[str] = set()

    def run(self) -> None:
        """Answer until the connection ends, and then release everything."""
        pool = ThreadPoolExecutor(_MOST_THREADS, "octavo-driver")
        for line in self._lines:
            message = json.loads(line)
            if message["op"] == "open":
                self._answer(message)  # in the main thread, which ray wants
            else:
                pool.submit(self._answer, message)
        _end_after(_CLOSING_SECONDS)
        if self._placement is not None:
            self._placement.close()

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            answer = self._obey(message)
        except OctavoError as error:
            kind = "config" if isinstance(error, ConfigError) else "engine"
            answer = {"error": str(error), "kind": kind}
        except Exception as error:  # of ray, whatever it is: the server has to hear of it
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "engine"}
        self._send({"id": message["id"], **answer})

    def _obey(self, message: dict[str, Any]) -> dict[str, Any]:
        name = message.get("name", "")
        match message["op"]:
            case "open":
                self._placement = open_placement(message["kind"], message["settings"])
                return {
                    "address": self._placement.address,
                    "num_released": self._placement.num_released,
                    "num_gpus": self._placement.num_gpus,
                    "cpus": self._placement.cpus_for(message["num_processes"]),
                }
            case "lease":
                lease = self._lease(name, Bundle(message["cpus"], message["gpus"]))
                return {"num_alike": lease.num_alike}
            case "start":
                host = self._hosts[name] = self._leases[name].new_host()
                host.start(ProcessSpec.of_json(message["spec"]))
            case "kill":
                if name in self._hosts:
                    self._hosts[name].kill(message["signum"])
            case "end":
                return self._end_of(name, message["seconds"])
            case "release":
                self._release(name)
        return {}

    def _lease(self, name: str, bundle: Bundle) -> Lease:
        assert self._placement is not None
        if name not in self._leases:
            self._released.discard(name)
            lease = self._placement.lease(name, bundle, self._tell_waiting)
            if name in self._released:  # while it waited
                lease.release()
                raise EngineError("it was released")
            self._leases[name] = lease
        return self._leases[name]

    def _release(self, name: str) -> None:
        self._released.add(name)
        self._hosts.pop(name, None)
        if (lease := self._leases.pop(name, None)) is not None:
            lease.release()

    def _end_of(self, name: str, seconds: float) -> dict[str, Any]:
        if (host := self._hosts.get(name)) is None:
            raise EngineError("it was released")
        if (end := host.end_of_process(seconds)) is None:
            return {"status": None}
        return {"status": end.status, "memory": base64.b64encode(end.memory).decode()}

    def _tell_waiting(self, text: str) -> None:
        self._send({"waiting": text})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            try:
                self._connection.sendall(data)
            except OSError:
                return  # the server has gone; so does this process


def main(fd: int) -> NoReturn:
    """Serve one connection, and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    Driver(socket.socket(fileno=fd)).run()
    os._exit(0)  # threads that wait for a place are not waited for


def _end_after(seconds: float) -> None:
    """End this process by then, though a cluster should not answer."""
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
