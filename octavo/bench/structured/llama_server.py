"""`LlamaServer`, a server of llama.cpp that answers under the same schemas."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base.errors import BenchmarkError
from octavo.bench.child_processes import ending_on_sigterm

_TIMEOUT = 600.0  # seconds of an answer
_START_TIMEOUT = 120.0  # seconds until the model is loaded
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
_PROMPT_TOKENS = 2048  # of a stream, at most
_LAST_LINES = 2000  # bytes of its output, for an error


class LlamaAnswer(NamedTuple):
    """An answer, and its tokens a second after the first."""

    text: str
    is_finished: bool
    num_tokens: int
    decode_tps: float


class LlamaQuestion(NamedTuple):
    """A prompt to answer, with exactly ``max_tokens`` where there is no schema."""

    prompt: str
    max_tokens: int
    schema: Mapping[str, Any] | None = None


class LlamaServer:
    """A client of llama-server's ``/completion``.

    Args:
        url: http://host:port
    """

    def __init__(self, url: str):
        if not url.startswith(("http://", "https://")):
            raise BenchmarkError(
                f"--llama-server: {url!r} is neither a program here nor a URL such as http://127.0.0.1:8080"
            )
        self._url = url.rstrip("/")

    def answers(self, questions: Sequence[LlamaQuestion]) -> list[LlamaAnswer]:
        """Return greedy answers to questions that are asked at the same time.

        Raises:
            BenchmarkError: the server does not answer, or with something else.
        """
        with ThreadPoolExecutor(len(questions)) as threads:
            return list(threads.map(self._answer, questions))

    def _answer(self, question: LlamaQuestion) -> LlamaAnswer:
        prompt, max_tokens, schema = question
        asked: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "cache_prompt": False,
            **({"ignore_eos": True} if schema is None else {"json_schema": schema}),
        }
        request = urllib.request.Request(
            f"{self._url}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                found = json.load(response)
            timings = found["timings"]
            return LlamaAnswer(
                str(found["content"]),
                found.get("stop_type") == "eos",
                int(timings["predicted_n"]),
                float(timings["predicted_per_second"]),
            )
        except urllib.error.HTTPError as error:
            message = error.read(2000).decode(errors="replace")
            raise BenchmarkError(f"llama-server: {error.code} {message}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"llama-server at {self._url}: {error!r}") from error


@contextmanager
def running_llama_server(
    program: Path, model: Path, *, streams: int, threads: int, max_tokens: int
) -> Iterator[LlamaServer]:
    """Start a llama-server on a free port of this machine, and end it in any case.

    Args:
        model: a GGUF file.
        streams: answers at the same time, each of up to ``max_tokens``.

    Raises:
        BenchmarkError: it does not start; tells its last lines.
    """
    if model.suffix != ".gguf":
        raise BenchmarkError(f"--llama-server: llama.cpp reads GGUF files, and {model} is none")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--model", model, "--host", "127.0.0.1", "--port", port]
    command += ["--threads", threads, "--threads-batch", threads, "--parallel", streams]
    command += ["--ctx-size", streams * (_PROMPT_TOKENS + max_tokens)]
    with ending_on_sigterm(), tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [os.fspath(each) if isinstance(each, Path) else str(each) for each in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        except OSError as error:
            raise BenchmarkError(f"--llama-server: {program} cannot be run: {error}") from error
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, log.fileno())
            yield LlamaServer(url)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=_START_TIMEOUT).close()
        except OSError:  # it does not listen yet, or loads its model
            time.sleep(_POLL_SECONDS)
        else:
            return
    said = os.pread(log, _LAST_LINES, max(0, os.fstat(log).st_size - _LAST_LINES))
    raise BenchmarkError(f"llama-server does not start: {said.decode(errors='replace').strip()}")
