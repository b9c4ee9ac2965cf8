"""The host KV cache of several ranks, in one memory."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from octavo.runtime import host_rows
from octavo.runtime.host_rows import HostFile, HostMemory, HostRows

PARTS = [48, 16, 32]


@pytest.fixture
def ranks():
    file = HostFile.create()
    return [HostMemory(file, rank, PARTS, num_blocks=5) for rank in range(len(PARTS))]


def test_parts_lie_side_by_side(ranks):
    for number, rank in enumerate(ranks):
        rank.own[2] = number + 1
    row = bytes(HostRows(ranks[0])[2])
    assert row == b"\1" * 48 + b"\2" * 16 + b"\3" * 32
    rows = HostRows(ranks[0])
    rows[4][:] = bytes(range(96))
    assert [bytes(rank.own[4]) for rank in ranks] == [
        bytes(range(48)), bytes(range(48, 64)), bytes(range(64, 96))
    ]  # fmt: skip
    assert len(rows) == 5 and not np.any(ranks[0].rows[[0, 1, 3]])


def test_a_row_is_given_when_all_have_made_their_copies(ranks):
    rows, got = HostRows(ranks[0]), threading.Event()
    rows.begin_copies()
    rows.begin_copies()
    thread = threading.Thread(target=lambda: (rows[0], got.set()), daemon=True)
    thread.start()
    for rank in (ranks[0], ranks[0], ranks[1], ranks[2], ranks[2]):
        rank.note_copies()
        assert not got.wait(0.01)
    ranks[1].note_copies()
    assert got.wait(60)


def test_a_rank_that_does_not_come_is_an_error(ranks, monkeypatch):
    monkeypatch.setattr(host_rows, "_MOST_SECONDS", 0.01)
    rows = HostRows(ranks[0])
    rows.begin_copies()
    for rank in ranks[1:]:
        rank.note_copies()
    with pytest.raises(OSError, match="does not make its copies"):
        rows[0]


def test_the_descriptor_is_closed_once(ranks):
    file = HostFile.create()
    copy = os.dup(file.fd)
    file.close()
    file.close()
    with pytest.raises(OSError):
        os.fstat(file.fd)
    os.close(copy)
