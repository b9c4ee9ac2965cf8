"""The first rank of a stage passes what it gets over links to the other ranks of its machine."""

from __future__ import annotations

import os
import sys
import threading
from array import array

import numpy as np
import pytest

from octavo.base.errors import PeerEndedError
from octavo.kernels.cpu import library
from octavo.kernels.parts import Stage
from octavo.runtime.rank_memory import SHARED, Membership, descriptors
from octavo.runtime.stage_links import PipelinePlace, StageFailedError
from octavo.runtime.stage_memory import StageMemory

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="groups are of Linux"),
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
]


class Wire:
    """Both ends of what is between machines."""

    room = 64

    def __init__(self):
        self.words: list[list[int]] = []
        self.values: list[object] = []
        self.is_aborted = False

    def pieces(self, num_words: int) -> int:
        return 1

    def open(self, widths, max_tokens, depth) -> None: ...

    def send(self, words) -> None:
        self.words.append(words.tolist())

    def receive(self, number=None, values=None):
        if values is None:
            return np.array(self.words.pop(0), dtype=np.int32)
        what = self.values.pop(0)
        if isinstance(what, Exception):
            raise what
        values[0][:] = what
        return None

    def abort(self) -> None:
        self.is_aborted = True


def stage(index: int, count: int, tp: int) -> tuple[StageMemory, list[Membership], Wire]:
    """The memory of a stage, all of its ranks, and what comes from other machines."""
    wire = Wire()
    place = PipelinePlace(Stage(index, count), wire, wire if index else None)
    memory = StageMemory(place, tp, is_crowded=True)
    ranks = [memory.first]
    for rank in memory.followers:
        ticket = memory.ticket(rank)
        copies = {fd: os.dup(fd) for fd in descriptors(ticket)}
        entries = {name: ticket[name] for name in SHARED if ticket[name] is not None}
        mine = {name: [copies[fd], *more] for name, (fd, *more) in entries.items()}
        ranks.append(Membership.attach(ticket | mine))
    return memory, ranks, wire


@pytest.mark.parametrize(("index", "first"), [(0, 6), (1, 3), (2, 0)])
def test_ranks_are_counted_from_the_last_stage_on(index, first):
    memory, ranks, _ = stage(index, 3, 3)
    assert [each.rank for each in ranks] == [first, first + 1, first + 2]
    assert [each.local_rank for each in ranks] == [0, 1, 2]
    assert {each.size for each in ranks} == {9}
    assert [each.group.rank for each in ranks] == [0, 1, 2]
    assert [each.pipeline.stage for each in ranks] == [Stage(index, 3)] * 3
    assert all((each.pipeline.incoming is None) == (index == 0) for each in ranks)
    memory.close()


def test_messages_that_come_are_passed_on_in_their_order():
    memory, (first, *others), wire = stage(0, 2, 3)
    messages = [[7], [1, -2, 3], [*range(40_000)]]
    wire.words = [list(each) for each in messages]
    got: list[list[list[int]]] = [[], []]

    def read(index: int) -> None:
        for _ in messages:
            got[index].append(others[index].messages.receive().tolist())

    readers = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for reader in readers:
        reader.start()
    assert [first.messages.receive().tolist() for _ in messages] == messages
    for reader in readers:
        reader.join()
    assert got == [messages, messages]
    memory.close()


def test_messages_of_the_home_rank_go_to_other_machines_and_to_its_own():
    memory, (first, other), wire = stage(1, 2, 2)
    assert first.messages.room == other.messages.room  # the ring has less than the link
    assert first.messages.pieces(1 << 20) == other.messages.pieces(1 << 20) > 1
    first.messages.send(array("i", [7, 8]))
    assert wire.words == [[7, 8]]
    assert other.messages.receive().tolist() == [7, 8]
    memory.close()


def test_all_ranks_get_the_values_of_the_stage_before_and_its_failures():
    memory, ranks, wire = stage(1, 2, 3)
    for each in ranks:
        each.pipeline.incoming.open([4], 8, 2)
    sent = np.arange(12, dtype=np.float32).reshape(3, 4)
    wire.values = [sent, StageFailedError("NaN in layer 3"), sent + 1]
    for number in range(3):
        for each in ranks:
            got = [np.empty((3, 4), dtype=np.float32)]
            if number == 1:
                with pytest.raises(StageFailedError, match="^NaN in layer 3$"):
                    each.pipeline.incoming.receive(number, got)
            else:
                each.pipeline.incoming.receive(number, got)
                assert np.array_equal(got[0], sent + number // 2)
    memory.close()


def test_what_ends_here_is_told_to_other_machines_and_ends_all_waiting():
    memory, (first, other), wire = stage(1, 2, 2)
    other.pipeline.incoming.open([4], 8, 2)
    memory.abort()
    with pytest.raises(PeerEndedError):
        other.messages.receive()
    with pytest.raises(PeerEndedError):
        other.pipeline.incoming.receive(0, [np.empty((1, 4), dtype=np.float32)])
    with pytest.raises(PeerEndedError):
        first.group.meet()
    assert not wire.is_aborted
    first.messages.abort()
    assert wire.is_aborted
    memory.close()
