"""A llama-server that answers under the same schemas, by a stand-in over a socket."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from octavo.base.errors import BenchmarkError
from octavo.bench.structured.llama_server import LlamaServer


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
    assert peer.answer("hello", 9, {"type": "object"}) == ("{}", True, 7, 12.5)
    peer.answer("hello", 9)
    constrained, plain = asked
    assert constrained["path"] == plain["path"] == "/completion"
    assert constrained["json_schema"] == {"type": "object"} and "ignore_eos" not in constrained
    assert "json_schema" not in plain and plain["ignore_eos"] and plain["n_predict"] == 9


@pytest.mark.parametrize("answer", [(400, {"error": "no such keyword"}), (200, {"content": "x"})])
def test_what_goes_wrong_is_said(server, answer):
    url, _, answers = server
    answers.append(answer)
    with pytest.raises(BenchmarkError, match="no such keyword|timings"):
        LlamaServer(url).answer("hello", 9)


def test_where_nothing_answers():
    with pytest.raises(BenchmarkError, match="127.0.0.1:9"):
        LlamaServer("http://127.0.0.1:9").answer("hello", 9)
    with pytest.raises(BenchmarkError, match="no URL"):
        LlamaServer("127.0.0.1")
