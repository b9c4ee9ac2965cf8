"""Servers in processes of their own, for the clients that people use."""

from __future__ import annotations

import contextlib
import gc
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer


def pytest_itemcollected(item: pytest.Item) -> None:
    """What a client leaves open, Python says of its own socket, and not whose it was."""
    item.add_marker(pytest.mark.filterwarnings("default::ResourceWarning"))


@pytest.fixture(scope="module", autouse=True)
def leftovers() -> Iterator[None]:
    """Clients' sockets are closed here, not in the midst of somebody else's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Nothing in the environment sends a client elsewhere, or a server other keys."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
            patch.delenv(name, raising=False)
        for name in ("OPENAI_API_BASE", "OPENAI_PROXY", "OCTAVO_API_KEY", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"):
            patch.delenv(name, raising=False)
        for name in ("OLLAMA_HOST", "OLLAMA_API_KEY"):
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
    flags = ("--num-blocks", "2048", "--trust-request-chat-template", "--allow-window")
    return start_server("smollm2-135m", *flags)


@pytest.fixture(scope="session")
def coder_server(start_server) -> LiveServer:
    """A model that knows tools."""
    return start_server("qwen2.5-coder-0.5b", "--max-model-len", "8192", "--num-blocks", "1024")


@pytest.fixture(scope="session")
def tiny_server(start_server, tiny_model, tmp_path_factory) -> LiveServer:
    """A tiny random model with little room, for clients that have a key.

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
    flags += ["--priority-range", "3"]
    flags += ["--served-model-name", "tiny", "--served-model-name", "team/tiny-too"]
    for name in ("openai", "hasty", "litellm", "langchain", "huggingface"):
        flags += ["--api-key", f"{name}-key"]
    flags += ["--api-key", "a-key"]
    return start_server(folder, *flags, key="a-key", faults={"raise": 186, "slow": 187})


@pytest.fixture(scope="session")
def tokenizer(smollm2_gguf):
    from octavo.sources.open import load_tokenizer

    return load_tokenizer(smollm2_gguf)
