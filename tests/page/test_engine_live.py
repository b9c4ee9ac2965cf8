"""The dashboard of a real server, whose engine is killed while it is looked at."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from live_server import ADMIN_KEY, LiveServer

pytestmark = pytest.mark.slow

STARTING = 60.0  # seconds for an engine to start on a busy machine
KEY = "secret"


@pytest.fixture
def server(tiny_model) -> Iterator[LiveServer]:
    with LiveServer(tiny_model, "--api-key", KEY, key=KEY) as server:
        yield server


@pytest.fixture
def open_board(tab_at, server) -> Callable[[], object]:
    def open_board():
        tab = tab_at(server.url + "/")
        tab.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        tab.open("engine")
        tab.wait_for_text("#state", "ready")
        return tab

    return open_board


def answer(server: LiveServer, num_tokens: int) -> None:
    body = {"prompt": "some words", "max_tokens": num_tokens, "ignore_eos": True}
    assert server.fetch("/v1/completions", body).status == 200


def test_two_see_an_engine_die_and_come_back(open_board, server):
    first, second = open_board(), open_board()
    answer(server, 7)
    for board in (first, second):
        board.wait_for("document.querySelectorAll('#ended tbody tr').length === 1")
        board.wait_for_text(".holders", "cached")
    shown = [(board.text("#ended"), board.text(".holders")) for board in (first, second)]
    assert shown[0] == shown[1] and "\t7\t" in shown[0][0]

    os.kill(server.engine_pid, signal.SIGKILL)
    for board in (first, second):
        board.wait_for_text("#notes", "engine restarting")  # it stays, unlike the state
    first.wait_for("document.getElementById('state').innerText === 'ready'", STARTING)
    first.wait_for("document.querySelectorAll('.holders li').length === 1")
    assert "free" in first.text(".holders"), "the new engine's blocks, of which none is used"
    assert "engine restarting" in first.text("#notes") and "engine ready" in first.text("#notes")

    second.open("health")  # it leaves, and the other one goes on
    answer(server, 9)
    first.wait_for("document.querySelectorAll('#ended tbody tr').length === 2")
    first.wait_for_text(".holders", "cached")
    assert "\t9\t" in first.text("#ended")
