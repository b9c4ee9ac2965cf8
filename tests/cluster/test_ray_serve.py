"""The deployment for Ray Serve: its settings, and one that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_ray import Cluster

from octavo.base.errors import ConfigError, EngineError
from octavo.cluster import ray_serve

DRIVER = """
import http.client, json, os, signal, sys
import ray
from ray import serve
from octavo.cluster.ray_serve import app

ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[3])})
serve.run(app({"model": sys.argv[2], "flags": "--max-num-seqs 4 --served-model-name tiny"}))

def ask(method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[3]), timeout=60)
    headers = {"content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.getheader("content-type"), answer.read().decode()

body = {"prompt": "Hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
print(json.dumps({
    "models": ask("GET", "/v1/models"),
    "whole": ask("POST", "/v1/completions", body),
    "streamed": ask("POST", "/v1/completions", {**body, "stream": True}),
    "wrong": ask("POST", "/v1/completions", {**body, "max_tokens": -1}),
    "nowhere": ask("GET", "/nowhere"),
}), flush=True)
serve.shutdown()
"""


def test_a_server_that_does_not_start_is_said():
    process = ray_serve.ServerProcess("/nothing/here", [])
    with pytest.raises(EngineError, match="octavo serve ended with 1.*nothing/here"):
        process.url.result(120)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_server_ends_with_the_process_that_started_it(tiny_model):
    code = (
        "import sys\n"
        "from octavo.cluster.ray_serve import ServerProcess\n"
        "print(ServerProcess(sys.argv[1], []).url.result(120), flush=True)\n"
        "import time; time.sleep(120)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_model)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        try:
            assert parent.stdout.readline().startswith(b"http://127.0.0.1:")
            mine = [pid for pid in _processes() if _parent(pid) == parent.pid]
            assert mine
        finally:
            parent.kill()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/exe").exists() for pid in mine):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_settings_that_there_are_none_of_are_refused():
    with pytest.raises(ConfigError, match="modle: settings are model, flags"):
        ray_serve.app({"modle": "x"})


@pytest.mark.long
@pytest.mark.xdist_group("ray")
def test_a_deployment_answers_as_the_server_does(tmp_path, tiny_model):
    pytest.importorskip("ray.serve")
    pytest.importorskip("aiohttp")
    cluster = Cluster(tmp_path, num_nodes=1)
    try:
        environment = {**os.environ, **cluster.env, "RAY_AUTH_MODE": "token"}
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, cluster.address, str(tiny_model), "18765"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answers = json.loads(done.stdout.splitlines()[-1])
    finally:
        cluster.close()
    assert json.loads(answers["models"][2])["data"][0]["id"] == "tiny"
    whole = json.loads(answers["whole"][2])
    assert answers["whole"][0] == 200 and whole["usage"]["completion_tokens"] == 20
    status, kind, text = answers["streamed"]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert status == 200 and kind.startswith("text/event-stream") and events[-1] == "[DONE]"
    streamed = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert streamed == whole["choices"][0]["text"]
    assert answers["wrong"][0] == 400 and answers["nowhere"][0] == 404


def _processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
