"""Replicas on a real Ray cluster: a head and a second node, both on this machine's loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from live_ray import PATIENCE, Cluster, command_line, descendants, is_gone, until
from live_server import LiveServer

pytest.importorskip("ray")
pytest.importorskip("cryptography")
pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("ray"))
    yield cluster
    cluster.close()


@pytest.fixture
def server(cluster, tiny_model):
    with cluster.serve(tiny_model, "--data-parallel-size", "2", "--resume-streams") as server:
        yield server
    until(lambda: not cluster.workers(), "the engines of a killed server end")
    until(lambda: not cluster.status()["places"], "places of a killed server are given back")


def states(server) -> list[str]:
    answer = asyncio.run(server.ask("/octavo/replicas"))
    return [each["state"] for each in answer.json()["replicas"]]


def num_restarts(server) -> int:
    answer = asyncio.run(server.ask("/octavo/replicas"))
    return sum(each["num_restarts"] for each in answer.json()["replicas"])


def complete(server, prompt="Hello", **fields) -> str:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}
    answer = asyncio.run(server.ask("/v1/completions", body))
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["text"]


def test_a_cluster_asks_for_its_token_and_shows_its_machines(cluster):
    state = cluster.status()
    assert state["asks_for_token"]
    assert [each["cpus"] for each in state["machines"]] == [1, 1]
    assert sum(each["is_head"] for each in state["machines"]) == 1
    token = Path(cluster.env["HOME"]) / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o077 == 0
    secret = token.read_text()
    for node in cluster.started:
        for pid in (node["pid"], *descendants(node["pid"])):
            assert secret.encode() not in command_line(pid)


def test_who_has_no_token_is_refused(cluster, tmp_path):
    done = cluster.octavo(
        *("cluster", "status", "--ray-address", cluster.address), env={"HOME": str(tmp_path)}
    )
    assert done.returncode == 1 and "token" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("wrong")
    done = cluster.octavo(
        *("cluster", "status", "--ray-address", cluster.address), env={"HOME": str(tmp_path)}
    )
    assert done.returncode == 1 and "token" in done.stderr, done.stderr


def test_each_machine_gets_one_and_all_answer(cluster, server):
    assert states(server) == ["ready", "ready"]
    assert sorted(cluster.workers().values()) == sorted(node["pid"] for node in cluster.started)
    assert len({complete(server) for _ in range(4)}) == 1
    names = {each["name"].partition("/")[2] for each in cluster.status()["places"]}
    assert names == {"replica-0", "replica-1"}


@pytest.mark.parametrize("victim", [b"hosted_worker", b"ray::ProcessHost"])
def test_what_is_killed_on_one_machine_comes_back(cluster, server, victim):
    expected = complete(server)
    before, pid = cluster.workers(), cluster.process(1, victim)
    (worker,) = (each for each, node in before.items() if node == cluster.started[1]["pid"])
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(worker), "the engine ends with its actor")
    assert complete(server) == expected
    until(lambda: states(server) == ["ready", "ready"] and num_restarts(server), "it comes back")
    assert len(cluster.workers()) == 2


def test_a_driver_that_is_killed_is_started_again(cluster, server):
    (driver,) = (
        pid for pid in descendants(server.process.pid) if b"cluster.driver" in command_line(pid)
    )
    before = cluster.workers()
    os.kill(driver, signal.SIGKILL)
    until(lambda: all(map(is_gone, before)), "engines end with the driver that has placed them")
    until(lambda: states(server) == ["ready", "ready"] and num_restarts(server), "they come back")


def test_a_stop_gives_all_places_back(cluster, tiny_model):
    with cluster.serve(tiny_model) as server:
        assert states(server) == ["ready"]
        server.stop()
        until(lambda: not cluster.workers(), "engines end", 30.0)
        assert not cluster.status()["places"]


def test_places_of_an_earlier_server_are_released_by_name(cluster, tiny_model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    leak = f"""
import ray
from ray.util.placement_group import placement_group
ray.init(address={cluster.address!r}, namespace="octavo", log_to_driver=False)
group = placement_group(
    [{{"CPU": 1}}], name="octavo-{socket.gethostname()}-{port}/replica-0", lifetime="detached"
)
assert group.wait(60)
"""
    environment = {**os.environ, **cluster.env, "RAY_AUTH_MODE": "token"}
    subprocess.run([sys.executable, "-c", leak], check=True, env=environment, timeout=PATIENCE)
    assert len(cluster.status()["places"]) == 1
    with cluster.serve(tiny_model, "--data-parallel-size", "2", "--port", str(port)) as server:
        assert states(server) == ["ready", "ready"]
        assert any("1 place of an earlier server" in line for line in server.log)
        server.stop()


def test_what_does_not_fit_is_said_and_ends(cluster, tiny_model):
    flags = ("--threads", "64", "--lease-timeout", "12")
    with cluster.serve(tiny_model, *flags, waits=False) as server:
        assert server.process.wait(PATIENCE) == 1
        text = "\n".join(server.log)
    assert "64 CPUs on one machine are asked for" in text
    assert "2 machines with 1 CPU, 1 CPU" in text
    assert "no machine has enough CPUs" in text
    assert "no place in the Ray cluster in 12 s" in server.log[-1]


def test_a_raylet_that_is_killed_takes_its_engine_and_no_other(tmp_path, tiny_model):
    cluster = Cluster(tmp_path)
    try:
        flags = ("--data-parallel-size", "2", "--resume-streams")
        with cluster.serve(tiny_model, *flags) as server:
            expected = complete(server)
            head = cluster.started[0]["pid"]
            (lost,) = (pid for pid, node in cluster.workers().items() if node != head)
            os.kill(cluster.process(1, b"raylet/raylet"), signal.SIGKILL)
            until(lambda: is_gone(lost), "the engine ends with the raylet")
            assert complete(server) == expected
            until(lambda: sorted(states(server)) == ["ready", "restarting"], "one goes on")
        until(lambda: not cluster.workers(), "nothing is left")
    finally:
        cluster.close()


def test_a_head_that_is_killed_leaves_no_orphan(tmp_path, tiny_model):
    cluster = Cluster(tmp_path)
    try:
        with cluster.serve(tiny_model, "--data-parallel-size", "2") as server:
            workers = cluster.workers()
            assert len(workers) == 2
            os.kill(cluster.process(0, b"gcs/gcs_server"), signal.SIGKILL)
            until(lambda: all(map(is_gone, workers)), "all engines end", 180.0)
            assert server.process.poll() is None  # the server outlives it, and says so
            assert asyncio.run(server.ask("/health")).status == 503
    finally:
        cluster.close()


def test_an_open_cluster_is_refused_unless_allowed(tmp_path, tiny_model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{probe.getsockname()[1]}"
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    port = address.rpartition(":")[2]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.2", f"--port={port}", "--num-cpus=1"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--min-worker-port=0"]
    command += ["--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    ray = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: can_connect(address), "the open cluster is there")
        flags = ("--distributed", "ray", "--ray-address", address)
        env = {"HOME": str(tmp_path), "PYTHONPATH": environment["PYTHONPATH"]}
        with LiveServer(tiny_model, *flags, env=env, waits=False) as server:
            assert server.process.wait(PATIENCE) == 1
            assert "asks for no token" in server.log[-1] and "--allow-open-ray" in server.log[-1]
        with LiveServer(tiny_model, *flags, "--allow-open-ray", env=env) as server:
            assert states(server) == ["ready"]
    finally:
        os.killpg(ray.pid, signal.SIGKILL)
        ray.wait()


def can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), 1.0).close()
        return True
    return False
