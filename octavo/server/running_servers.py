"""The servers that run on this machine, each of which leaves a note while it does.

    $OCTAVO_HOME/servers/PID.json     {"pid", "url", "started"}

A note outlives a server that was killed; who reads the notes removes those of processes that have
ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.base.files import replace_file
from octavo.hub.store import home

_log = logging.getLogger("octavo.server")

_FOLDER = "servers"
_MOST = 256  # notes that are read
_MAX_BYTES = 4096  # of one


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server. ``started``: Unix time."""

    pid: int
    url: str
    started: float


@contextlib.contextmanager
def noted(url: str) -> Iterator[None]:
    """Leave a note within the block. Where none can be written, none is."""
    path = home() / _FOLDER / f"{os.getpid()}.json"
    note = RunningServer(os.getpid(), url, time.time())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(asdict(note)).encode())
    except OSError as error:
        _log.info("octavo ps will not find this server: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def running_servers() -> list[RunningServer]:
    """Return the servers whose processes run, the oldest first."""
    found = []
    try:
        paths = sorted((home() / _FOLDER).glob("*.json"))[:_MOST]
    except OSError:
        return []
    for path in paths:
        server = _read(path)
        if server is not None and _is_running(server.pid):
            found.append(server)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda server: server.started)


def _read(path: Path) -> RunningServer | None:
    """Return what a note says; None if it is damaged."""
    try:
        with open(path, "rb") as file:
            said = json.loads(file.read(_MAX_BYTES))
        server = RunningServer(int(said["pid"]), str(said["url"]), float(said["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return server if path.name == f"{server.pid}.json" else None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
