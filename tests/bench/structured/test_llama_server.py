"""A llama-server that answers under the same schemas, by a stand-in over a socket."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from octavo.base.errors import BenchmarkError
from octavo.bench.structured.llama_server import (
    LlamaQuestion,
    LlamaServer,
    running_llama_server,
)


@pytest.fixture
def server():
    """The URL of a stand-in, what it was asked, and what it answers with."""
    asked: list[dict] = []
    answers = [(200, {})]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append({"path": self.path, **json.loads(body)})
            status, answer = answers[-1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *arguments):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/", asked, answers
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_an_answer(server):
    url, asked, answers = server
    answers.append(
        (
            200,
            {
                "content": "{}",
                "stop_type": "eos",
                "timings": {"predicted_n": 7, "predicted_per_second": 12.5},
            },
        )
    )
    peer = LlamaServer(url)
    questions = [LlamaQuestion("hello", 9, {"type": "object"}), LlamaQuestion("hello", 9)]
    assert peer.answers(questions) == [("{}", True, 7, 12.5)] * 2
    constrained, plain = sorted(asked, key=lambda each: "ignore_eos" in each)
    assert constrained["path"] == plain["path"] == "/completion"
    assert constrained["json_schema"] == {"type": "object"} and "ignore_eos" not in constrained
    assert "json_schema" not in plain and plain["ignore_eos"] and plain["n_predict"] == 9


@pytest.mark.parametrize("answer", [(400, {"error": "no such keyword"}), (200, {"content": "x"})])
def test_what_goes_wrong_is_said(server, answer):
    url, _, answers = server
    answers.append(answer)
    with pytest.raises(BenchmarkError, match="no such keyword|timings"):
        LlamaServer(url).answers([LlamaQuestion("hello", 9)])


def test_where_nothing_answers():
    with pytest.raises(BenchmarkError, match="127.0.0.1:9"):
        LlamaServer("http://127.0.0.1:9").answers([LlamaQuestion("hello", 9)])
    with pytest.raises(BenchmarkError, match="neither a program here nor a URL"):
        LlamaServer("127.0.0.1")


def program(folder: Path, text: str) -> Path:
    """Write a program of Python in place of llama-server."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


SERVES = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.send_error(400, " ".join(sys.argv[1:]))

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_of_its_own_runs_as_long_as_it_is_asked(tmp_path):
    model, settings = tmp_path / "m.gguf", {"streams": 4, "threads": 3, "max_tokens": 52}
    its_flags = "--model .*m.gguf .*--threads 3 .*--parallel 4"
    with (
        running_llama_server(program(tmp_path, SERVES), model, **settings) as server,
        pytest.raises(BenchmarkError, match=its_flags),
    ):
        server.answers([LlamaQuestion("hello", 9)])
    with pytest.raises(BenchmarkError, match="refused"):
        server.answers([LlamaQuestion("hello", 9)])


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("raise SystemExit('no such model')", "m.gguf", "does not start.*no such model"),
        ("", "folder", "reads GGUF files"),
    ],
)
def test_a_server_that_does_not_start(tmp_path, text, model, message):
    settings = {"streams": 1, "threads": 1, "max_tokens": 9}
    with (
        pytest.raises(BenchmarkError, match=message),
        running_llama_server(program(tmp_path, text), tmp_path / model, **settings),
    ):
        pass
