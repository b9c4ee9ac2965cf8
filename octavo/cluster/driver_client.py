"""`DriverClient`: a server's end of the connection to its `octavo.cluster.driver`."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

from octavo.base.errors import ConfigError, EngineError
from octavo.system.child_process import environment_without_keys

_log = logging.getLogger("octavo.server")

DRIVER = "octavo.cluster.driver"


class DriverClient:
    """Starts a driver, and asks it for what it has. May be used from any thread.

    The driver ends with this process, since its connection does; the thread that makes this object
    need not live on.
    """

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", DRIVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment_without_keys(),
            )
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._has_ended = False
        self._receiver = threading.Thread(target=self._receive, name="octavo-driver", daemon=True)
        self._receiver.start()

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **fields: Any) -> Future[dict[str, Any]]:
        """Ask for something; the future has the answer, or the ConfigError or EngineError."""
        future: Future[dict[str, Any]] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            number = next(self._numbers)
            data = json.dumps({"id": number, "op": op, **fields}).encode() + b"\n"
            try:
                if self._has_ended:
                    raise OSError("it has ended")
                self._connection.sendall(data)
                self._asked[number] = future
            except OSError as error:
                future.set_exception(EngineError(f"the driver of the cluster is gone: {error}"))
        return future

    def close(self, seconds: float = 10.0) -> None:
        """Have it release all leases, and end. One that takes longer is ended."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._receiver.join()

    def _receive(self) -> None:
        with self._connection.makefile("r", encoding="utf-8", newline="\n") as lines:
            for line in lines:
                self._take(json.loads(line))
        with self._lock:
            self._has_ended = True
            self._connection.close()
            asked, self._asked = self._asked, {}
        self._process.wait()
        for future in asked.values():
            future.set_exception(EngineError("the driver of the cluster has ended"))

    def _take(self, message: dict[str, Any]) -> None:
        if "waiting" in message:
            _log.warning("%s", message["waiting"])
            return
        with self._lock:
            future = self._asked.pop(message["id"])
        if "error" in message:
            kind = ConfigError if message["kind"] == "config" else EngineError
            future.set_exception(kind(message["error"]))
        else:
            future.set_result(message)
