"""Servers in processes of their own, for the clients that people use."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

START_SECONDS = 120.0


class LiveServer:
    """``octavo serve`` in a process, ready when this returns.

    Args:
        api_key: the one of its keys with which tests look at its load.
        faults: token ids by what the engine does when it meets them; see octavo/executor/faulty.py.
    """

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        api_key: str | None = None,
        faults: dict[str, int] | None = None,
    ):
        self.api_key = api_key
        self.url = ""
        self.log: list[str] = []
        self._has_faults = faults is not None
        if api_key is not None:
            flags = (*flags, "--api-key", api_key)
        command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", "0", *flags]
        environment = {**os.environ, "OCTAVO_FAULTS": json.dumps(faults)} if faults else None
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._is_known = threading.Event()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        if not self._is_known.wait(START_SECONDS) or not self.url:
            self.process.kill()
            self._end()
            pytest.fail("the server did not start:\n" + "".join(self.log[-20:]))

    @property
    def base_url(self) -> str:
        """Where the OpenAI API is."""
        return self.url + "/v1"

    def load(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/load", headers=headers)
            return json.loads(connection.getresponse().read())

    def wait_for_load(self, is_met: Callable[[dict[str, Any]], bool], seconds: float = 5.0) -> None:
        """Fails if the engine's load does not become such in time."""
        deadline = time.monotonic() + seconds
        while not is_met(load := self.load()):
            assert time.monotonic() < deadline, load
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        """Fails if anything runs, waits or holds blocks for long."""
        names = ("num_running", "num_waiting", "num_used_blocks")
        self.wait_for_load(lambda load: not any(load[name] for name in names))

    def stop(self) -> None:
        """Fails if it does not end well, or has met a bug of ours."""
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0, "".join(self.log[-20:])
        finally:
            self.process.kill()
            self._end()
        if not self._has_faults:
            assert "Traceback" not in "".join(self.log), "".join(self.log)

    def _end(self) -> None:
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if not self.url and (found := re.search(r"is ready on (http://\S+)", line)):
                self.url = found[1]
                self._is_known.set()
        self._is_known.set()


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Nothing in the environment sends a client elsewhere, or a server other keys."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
            patch.delenv(name, raising=False)
        for name in ("OPENAI_API_BASE", "OPENAI_PROXY", "OCTAVO_API_KEY", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        yield


@pytest.fixture(scope="session")
def start_server(environment) -> Iterator[Callable[..., LiveServer]]:
    """Starts a `LiveServer`, which runs until the tests are over."""
    with contextlib.ExitStack() as servers:

        def start(model: str | Path, *flags: str, **kwargs: Any) -> LiveServer:
            server = LiveServer(model, *flags, **kwargs)
            servers.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def server(start_server, smollm2_gguf) -> LiveServer:
    """The default model, as anybody may ask it; also with chat templates of their own."""
    return start_server("smollm2-135m", "--num-blocks", "2048", "--trust-request-chat-template")


@pytest.fixture(scope="session")
def tiny_server(start_server, tiny_model, tmp_path_factory) -> LiveServer:
    """A tiny random model with little room, for those who have a key.

    Its tokenizer begins texts with <bos>. Tokens that are in no UTF-8 make the engine slow (187,
    the byte FF) or fail (186, the byte FE). Each module has a key of its own, and so its own rate.
    """
    from tokenizers import Tokenizer, processors

    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(tiny_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 257)])
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = ["--max-num-seqs", "1", "--max-queued-requests", "2", "--rate-limit-requests", "100"]
    flags += ["--served-model-name", "tiny", "--served-model-name", "team/tiny-too"]
    for name in ("openai", "hasty", "litellm", "langchain", "huggingface"):
        flags += ["--api-key", f"{name}-key"]
    return start_server(folder, *flags, api_key="a-key", faults={"raise": 186, "slow": 187})


@pytest.fixture(scope="session")
def tokenizer(smollm2_gguf):
    from octavo.build import load_tokenizer

    return load_tokenizer(smollm2_gguf)
