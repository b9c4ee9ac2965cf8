from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

from octavo import cli
from octavo.cli.bench import serve


class Answers(BaseHTTPRequestHandler):
    """Three tokens at once, and silence for prompts that begin with "slow"."""

    def do_GET(self):
        self._send(b'{"data": [{"id": "m"}]}', "application/json")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["prompt"] == "refused":
            return self._send(b'{"error": {"message": "no"}}', "application/json", 400)
        if body["prompt"] == "slow":
            self.server.asked.set()
            time.sleep(2)
        token = b'data: {"choices": [{"text": "a"}]}\n\n'
        self._send(token * 3 + b"data: [DONE]\n\n", "text/event-stream")

    def _send(self, body, kind, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.asked = Event()
        thread = Thread(target=server.serve_forever)
        thread.start()
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def dataset(tmp_path):
    def create(*prompts):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
        return ["--dataset-name", "jsonl", "--dataset-path", str(path)]

    return create


@pytest.fixture
def parse(monkeypatch):
    """The configuration that a command line becomes."""
    found = []

    def run_serve_bench(config, progress, say):
        found.append(config)
        raise cli.UsageError("that is enough")

    fake = types.ModuleType("octavo.bench.serving.serve")
    fake.run_serve_bench = run_serve_bench
    monkeypatch.setitem(sys.modules, "octavo.bench.serving.serve", fake)
    monkeypatch.setattr(serve.terminal, "resolve", lambda model: None)

    def run(line):
        assert cli.main(["bench", "serve", *line.split()]) == 2
        return found.pop()

    return run


def test_flags_become_settings(parse):
    config = parse(
        "m --base-url http://x:1 --backend openai-chat --request-rate 4 --max-concurrency 8 "
        "--num-prompts 5 --random-input-len 9 --goodput ttft:200 tpot:50 --metadata a=b c=d "
        "--ignore-eos --header X=y --header Z=w --percentile-metrics ttft --duration 2.5"
    )
    assert config.model == "m" and config.target.base_url == "http://x:1"
    assert config.target.backend == "openai-chat" and config.target.headers == {"X": "y", "Z": "w"}
    assert config.load.request_rate == 4 and config.load.max_concurrency == 8
    assert config.load.duration == 2.5
    assert config.workload.num_prompts == 5 and config.workload.random_input_len == 9
    assert config.workload.fields == {"temperature": 0.0, "ignore_eos": True}
    assert config.report.goodput == ("ttft:200", "tpot:50")
    assert config.report.metadata == ("a=b", "c=d") and config.report.shown == ("ttft",)
    assert config.server_flags == ()


def test_without_a_url_a_server_gets_the_engine_flags(parse):
    config = parse("--max-num-seqs 3 --no-enable-prefix-caching --kv-cache-memory 1GiB")
    assert config.model is None and config.target.base_url is None
    flags = ("--max-num-seqs=3", "--no-enable-prefix-caching", f"--kv-cache-memory={2**30}")
    assert config.server_flags == flags


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--request-rate 0", "request_rate"),
        ("--goodput itl:3", "none of ttft"),
        ("--base-url http://x --max-num-seqs 3", "--max-num-seqs is for a server"),
        ("--backend tgi", "invalid choice"),
        ("--metric-percentiles x", "metric_percentiles"),
        ("--extra-body {", "extra_body"),
    ],
)
def test_wrong_usage_is_said(capsys, line, message):
    assert cli.main(["bench", "serve", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_help_shows_what_there_is(capsys):
    assert cli.main(["bench", "serve", "--help-all"]) == 0
    text = capsys.readouterr().out
    for flag in ("--base-url", "--goodput NAME:MS", "--speedup X", "--max-num-seqs N"):
        assert flag in text
    assert serve.EXAMPLES.splitlines()[2] in text


def test_help_needs_nothing_heavy():
    code = (
        "import sys; from octavo import cli; cli.main(['bench', 'serve', '--help']); "
        "assert not {'torch', 'numpy', 'rich', 'uvloop'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_table_and_files(server, dataset, tmp_path, capsys):
    flags = ["--base-url", server.url, *dataset("a", "b", "c"), "--goodput", "ttft:5000"]
    files = ["--output", str(tmp_path / "out.json"), "--request-log", str(tmp_path / "log")]
    picture = tmp_path / "latencies.svg"
    if importlib.util.find_spec("matplotlib"):
        files += ["--plot", str(picture)]
    assert cli.main(["bench", "serve", *flags, *files]) == 0
    said = capsys.readouterr()
    assert "Successful requests:                     3" in said.out
    assert "Request goodput (req/s):" in said.out and f"written to {tmp_path}/log" in said.err
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["completed"] == 3 and document["total_output_tokens"] == 9
    assert len((tmp_path / "log").read_text().splitlines()) == 3
    if "--plot" in files:
        assert "TTFT, ms" in picture.read_text()


def test_json(server, dataset, capsys):
    flags = ["--base-url", server.url, *dataset("a", "refused"), "--request-rate", "100", "--json"]
    assert cli.main(["bench", "serve", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["completed"], document["failed"]) == (1, 1)
    assert document["octavo"]["errors"] == {"HTTP 400: no": 1}


def test_no_answer_at_all_is_a_failure(server, dataset, capsys):
    flags = ["--base-url", server.url, *dataset("refused"), "--ready-check-timeout-sec", "0"]
    assert cli.main(["bench", "serve", *flags]) == 1
    assert "no request was answered" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--base-url", server.url, *dataset("refused")]) == 1
    assert "a first request to /v1/completions failed: HTTP 400: no" in capsys.readouterr().err


def test_ctrl_c_reports_what_there_is(server, dataset, ctrl_c):
    flags = [
        "--base-url",
        server.url,
        *dataset("a", "a", "slow"),
        "--max-concurrency",
        "1",
        "--json",
    ]
    command = [sys.executable, "-m", "octavo", "bench", "serve", *flags]
    log = subprocess.PIPE
    process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
    with process:
        assert server.asked.wait(30)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["completed"] == 2 and document["octavo"]["unfinished"] == 1
    assert "Traceback" not in err
