"""Ray clusters on this machine's loopback, started as people start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from live_server import LiveServer, command_line, descendants

PATIENCE = 120.0


def until(condition, what, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: it never came true"
        time.sleep(0.1)
    return found


class Cluster:
    """Ray, started by ``octavo cluster`` in a home of its own."""

    def __init__(self, folder: Path, *, num_nodes: int = 2):
        self.env = {
            "HOME": str(folder),
            "OCTAVO_HOME": str(folder / "octavo"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # So that a head that was killed is missed within seconds.
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
        }
        self.started = [self.run("start", "--port", "0", "--num-cpus", "1", "--json")]
        self.address = self.started[0]["address"]
        for number in range(1, num_nodes):
            host = f"127.0.0.{2 + number}"
            flags = ("--address", host, "--num-cpus", "1", "--json")
            self.started.append(self.run("join", self.address, *flags))

    def run(self, *words: str) -> dict:
        done = self.octavo("cluster", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def octavo(self, *words: str, env: dict[str, str] | None = None):
        return subprocess.run(
            [sys.executable, "-m", "octavo", *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, **self.env, **(env or {})},
        )

    def status(self) -> dict:
        return self.run("status", "--json", "--ray-address", self.address)

    def serve(self, model, *flags: str, env: dict[str, str] | None = None, **options):
        flags = ("--distributed", "ray", "--ray-address", self.address, *flags)
        return LiveServer(model, *flags, env={**self.env, **(env or {})}, **options)

    def workers(self) -> dict[int, int]:
        """The engines' processes in this cluster, with the pid of the node that each is on."""
        return {
            pid: node["pid"]
            for node in self.started
            for pid in descendants(node["pid"])
            if b"hosted_worker" in command_line(pid)
        }

    def process(self, node: int, word: bytes) -> int:
        """The first process of a node whose command line has a word."""
        found = descendants(self.started[node]["pid"])
        return next(pid for pid in found if word in command_line(pid))

    def close(self) -> None:
        for node in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node["pid"], signal.SIGKILL)


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}/exe")
