"""Links between stages: values, failures, and what is not in step."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from octavo.base.errors import PeerEndedError
from octavo.kernels.cpu import library
from octavo.kernels.cpu.group import ShmGroup
from octavo.runtime.stage_links import ShmLink, StageFailedError

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux alone"),
]
WIDTHS, MAX_TOKENS, DEPTH = (16, 5), 7, 3


@pytest.fixture
def ends():
    """The end that sends, and those of two ranks that receive."""
    groups = [ShmGroup.create(3, num_bytes=4 << 20, is_crowded=True)]
    for rank in (1, 2):
        groups.append(ShmGroup.attach(os.dup(groups[0].fd), rank, 3, is_crowded=True))
    links = [ShmLink(group) for group in groups]
    for link in links:
        link.open(WIDTHS, MAX_TOKENS, DEPTH)
    yield links
    for group in groups:
        group.close()


def values_of(number: int, num_tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [rng.standard_normal((num_tokens, width), dtype=np.float32) for width in WIDTHS]


def room_for(num_tokens: int) -> list[np.ndarray]:
    return [np.zeros((num_tokens, width), dtype=np.float32) for width in WIDTHS]


def test_all_ranks_get_the_values_of_each_step(ends):
    home, *others = ends
    sizes = [1 + number % MAX_TOKENS for number in range(40)]
    has_read = [threading.Semaphore(0) for _ in others]

    def receive(link: ShmLink, read: threading.Semaphore) -> bool:
        is_right = True
        for number, size in enumerate(sizes):
            link.receive(number, received := room_for(size))
            is_right &= all(map(np.array_equal, received, values_of(number, size)))
            read.release()
        return is_right

    with ThreadPoolExecutor(2) as threads:
        done = [*map(threads.submit, [receive] * len(others), others, has_read)]
        for number, size in enumerate(sizes):
            if number >= DEPTH:  # as the home rank waits for the results of an earlier step
                for read in has_read:
                    read.acquire()
            home.send(number, values_of(number, size))
        assert all(each.result() for each in done)


def test_values_may_be_overwritten_once_they_are_sent(ends):
    home, other, _ = ends
    values = values_of(1, 2)
    home.send(1, values)
    values[0][:] = 0
    other.receive(1, received := room_for(2))
    assert all(map(np.array_equal, received, values_of(1, 2)))


@pytest.mark.parametrize("reason", ["", "out of memory", "Ünïcode ☃", "x" * 5000])
def test_a_step_that_failed_is_told_and_the_next_one_comes(ends, reason):
    home, other, _ = ends
    home.fail(7, reason)
    home.send(8, values_of(8, 1))
    with pytest.raises(StageFailedError) as error:
        other.receive(7, room_for(3))
    assert str(error.value) == reason[:1000]
    other.receive(8, received := room_for(1))
    assert all(map(np.array_equal, received, values_of(8, 1)))


@pytest.mark.parametrize(("number", "num_tokens"), [(2, 3), (1, 4), (-1, 3)])
def test_another_step_than_the_awaited_one_is_the_end(ends, number, num_tokens):
    home, other, _ = ends
    home.send(1, values_of(1, 3))
    with pytest.raises(PeerEndedError, match="step -?[0-9]+, of . tokens, .* are not in step"):
        other.receive(number, room_for(num_tokens))


def test_an_abort_ends_the_waiting(ends):
    home, other, _ = ends
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.receive, 0, room_for(1))
        home.abort()
        with pytest.raises(PeerEndedError):
            waiting.result()
    with pytest.raises(PeerEndedError):
        home.send(0, values_of(0, 1))
