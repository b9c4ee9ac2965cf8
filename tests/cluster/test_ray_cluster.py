"""The bookkeeping of ``octavo cluster``, without ray."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError
from octavo.cli import main
from octavo.cluster import ray_cluster

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "octavo"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def node(monkeypatch):
    """A machine's part of a cluster whose first process, in place of ray's, says that it runs."""
    script = "print('Ray runtime started.', flush=True); import time; time.sleep(100)"
    pids = []

    def start_ray(flags, log):
        process = subprocess.Popen(
            [sys.executable, "-c", script, *flags],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        pids.append(process)
        return process

    monkeypatch.setattr(ray_cluster, "_start_ray", start_ray)
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: name == "ray")
    yield ray_cluster.start_head("127.0.0.2", 0, 3, None)
    for process in pids:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_what_was_started_is_known_and_stopped(node, capsys):
    assert ray_cluster.running_nodes() == [node]
    assert ray_cluster.address_of_cluster(None) == node.address
    flags = Path(f"/proc/{node.pid}/cmdline").read_text().split("\0")
    assert "--head" in flags and "--num-cpus=3" in flags and "--include-dashboard=false" in flags
    assert not any(flag.startswith("--num-gpus") for flag in flags)
    assert main(["cluster", "stop", "--json"]) == 0
    (stopped,) = json.loads(capsys.readouterr().out)["stopped"]
    assert stopped["pid"] == node.pid and stopped["is_head"]
    assert ray_cluster.running_nodes() == []
    assert main(["cluster", "stop"]) == 0
    assert "nothing runs here" in capsys.readouterr().err


def test_another_process_of_the_same_number_is_not_taken_for_it(node):
    file = ray_cluster._state_file(node.pid)
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "started": state["started"] + 1}))
    assert ray_cluster.running_nodes() == []
    file.write_text("damaged")
    assert ray_cluster.running_nodes() == []


def test_the_same_place_twice_is_refused(node):
    with pytest.raises(ConfigError, match="is in the cluster at .* already"):
        ray_cluster._start(node.address, node.host, False, [], None, None)


def test_a_token_is_made_for_these_eyes_alone(home):
    with pytest.raises(ConfigError, match="copy that file from the machine"):
        ray_cluster.token_file(makes_one=False)
    path = ray_cluster.token_file(makes_one=True)
    assert path == home / ".ray" / "auth_token"
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text()
    assert len(token) == 64
    assert ray_cluster.token_file(makes_one=True).read_text() == token


def test_a_token_elsewhere_is_used(home, monkeypatch):
    (home / "token").write_text("x")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "token"))
    assert ray_cluster.token_file(makes_one=False) == home / "token"


def test_which_cluster(monkeypatch):
    assert ray_cluster.address_of_cluster("10.0.0.1:6379") == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match="none is known here"):
        ray_cluster.address_of_cluster(None)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert ray_cluster.address_of_cluster(None) == "10.0.0.2:6379"


def test_a_port_that_is_taken_is_refused(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        port = taken.getsockname()[1]
        assert main(["cluster", "start", "--port", str(port)]) == 1
    assert "cannot be listened on" in capsys.readouterr().err


def test_nobody_there_is_said(home, capsys):
    assert main(["cluster", "join", "127.0.0.1:1"]) == 1
    assert "nothing answers at '127.0.0.1:1'" in capsys.readouterr().err
    assert main(["cluster", "status"]) == 1
    assert "which Ray cluster?" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_it_is_said_how_to_get_it(capsys):
    assert main(["cluster", "start", "--port", "0"]) == 1
    assert "pip install 'octavo[ray]'" in capsys.readouterr().err
