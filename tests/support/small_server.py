"""A server that answers each path with what it is given, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class SmallServer:
    """``answers``: by path, what becomes JSON, with a status where it is a pair, or a list of
    events of a stream. ``requests``: (path, headers, body) of each."""

    def __init__(self, answers: dict[str, Any]):
        self.answers = answers
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.url = ""


@contextlib.contextmanager
def small_server(answers: dict[str, Any]) -> Iterator[SmallServer]:
    told = SmallServer(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            told.requests.append((self.path, dict(self.headers), body))
            answer, status = told.answers.get(self.path, {}), 200
            if isinstance(answer, tuple):
                answer, status = answer
            if isinstance(answer, list):
                content = b"".join(
                    b"data: "
                    + (each if isinstance(each, bytes) else json.dumps(each).encode())
                    + b"\n\n"
                    for each in answer
                )
            else:
                content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        told.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield told
        finally:
            server.shutdown()
            thread.join()
