"""Ends of single ranks of a live server's engine, in the middle of answers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

BODY = {
    "stream": True,
    "prompt": "The capital of France is",
    "max_tokens": 150,
    "seed": 5,
    "temperature": 0.8,
    "ignore_eos": True,
    "return_token_ids": True,
}
_SECONDS = 60.0  # of which none is waited for where all is well


def ids_of(stream: Any) -> list[int]:
    """The tokens of a stream, which must be whole."""
    assert not stream.errors and stream.is_whole, stream.events[-1:]
    return [token for choice in stream.choices for token in choice.get("token_ids") or []]


async def signalled(server: Any, module: str, signum: int) -> list[int]:
    """The tokens of an answer in the middle of which the only process of a module got a signal."""
    (process,) = server.processes_of(module)
    return await signalled_process(server, process, signum)


async def signalled_process(server: Any, process: int, signum: int) -> list[int]:
    """The same of a process."""
    stream = await server.stream(BODY)
    for _ in range(3):
        await stream.next()
    os.kill(process, signum)
    return ids_of(await stream.rest())


def gone(pid: int, seconds: float = 20.0) -> None:
    """Wait for the end of a process."""
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def wait_until_restarted(server: Any, before: int) -> None:
    """Wait for the restart of the engine: the last tokens may come from the one that ends."""
    deadline = time.monotonic() + _SECONDS
    while server.load()["num_restarts"] == before or server.fetch("/health").status != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
