"""The engine's process: how it is started, and that it does not outlive the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.server.engine import process
from octavo.server.engine.process import EngineProcess, ProcessLauncher
from octavo.settings.engine import EngineArgs

# A server that has launched an engine and knows no more than that it loads.
SERVER = """
import sys, time
from octavo.server.engine import process

process.WORKER = "slow_worker"
args = {"file": sys.argv[1], "holds_the_interpreter": sys.argv[2] == "True"}
engine = process.EngineProcess(args, "text")
print(engine.pid, flush=True)
time.sleep(60)
"""


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.mark.parametrize("holds_the_interpreter", [False, True])
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_server_that_is_killed_leaves_no_engine_that_loads(tmp_path, holds_the_interpreter):
    mark = tmp_path / "loads"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(mark), str(holds_the_interpreter)],
        stdout=subprocess.PIPE,
        env=environment,
    ) as server:
        try:
            pid = int(server.stdout.readline())
            until(mark.exists)
            assert Path(f"/proc/{pid}/exe").exists()
        finally:
            server.send_signal(signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}/exe").exists(), 5.0)


def test_what_cannot_be_started_leaves_nothing_open(monkeypatch):
    def files():
        return set(os.listdir("/dev/fd"))

    before = files()
    monkeypatch.setattr(process.sys, "executable", "/no/such/python")
    for _ in range(3):
        with pytest.raises(FileNotFoundError, match="/no/such/python"):
            ProcessLauncher(EngineArgs("m")).launch()
    assert files() == before


def test_an_engine_that_was_started_ahead_is_the_first_one():
    launcher = ProcessLauncher(EngineArgs("no-such-model"))
    launcher.launch_ahead()
    first, second = launcher.launch(), launcher.launch()
    launcher.close()  # which has none to end
    try:
        assert first.pid != second.pid
        assert first.process.poll() is None and second.process.poll() is None
    finally:
        for engine in (first, second):
            engine.kill()
            engine.connection.close()
            engine.wait()


def test_an_engine_that_nobody_came_for_is_ended():
    before = set(os.listdir("/dev/fd"))
    launcher = ProcessLauncher(EngineArgs("no-such-model"))
    launcher.launch_ahead()
    process = launcher._ahead.process
    launcher.close()
    assert process.returncode is not None
    assert set(os.listdir("/dev/fd")) == before


def test_what_cannot_be_started_ahead_is_said_when_it_is_wanted(monkeypatch):
    launcher = ProcessLauncher(EngineArgs("m"))
    monkeypatch.setattr(process.sys, "executable", "/no/such/python")
    launcher.launch_ahead()
    with pytest.raises(FileNotFoundError, match="/no/such/python"):
        launcher.launch()


def test_an_engine_that_ends_says_how():
    engine = EngineProcess({}, "no such format")
    engine.connection.close()
    assert engine.wait() == "exit status 0"  # no request had come
    assert engine.at_work() == []
    engine.kill()


def test_of_the_servers_keys_the_engine_knows_nothing(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    engine = EngineProcess({}, "text")
    try:
        environment = Path(f"/proc/{engine.pid}/environ")
        if environment.exists():
            assert b"secret" not in environment.read_bytes()
    finally:
        engine.kill()
        engine.connection.close()
        assert engine.wait() == "signal 9"
