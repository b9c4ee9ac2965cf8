"""What tests of live servers get: the type `LiveServer`, whose servers end with their test whatever
happens, or a server that others use too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_server import LiveServer


@pytest.fixture(scope="session")
def live_server() -> Iterator[type[LiveServer]]:
    """The type of servers. ``with live_server(model, "--flag") as server:``"""
    if not Path("/proc/self/stat").exists():
        pytest.skip("the tests of live servers look into /proc")
    others = set(LiveServer.running)  # of the tests of clients, which end them politely
    yield LiveServer
    for server in LiveServer.running - others:
        server.close()


@pytest.fixture(scope="session")
def shared_server(live_server) -> Iterator[Callable[..., LiveServer]]:
    """Gives the server with these settings, which runs until the tests are over. It is idle before
    each module that asks for it; such modules are in one ``xdist_group``."""
    with contextlib.ExitStack() as stack:
        running: dict[tuple[str, ...], LiveServer] = {}

        def get(model: Path | str, *flags: str) -> LiveServer:
            settings = (str(model), *flags)
            if settings not in running:
                running[settings] = stack.enter_context(live_server(model, *flags))
            running[settings].wait_until_idle()
            return running[settings]

        yield get
