"""Blocks of other replicas behind the host KV cache: whatever goes wrong is a miss."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest

from octavo.core.block_store import following_keys, part_key, root_key
from octavo.core.host_kv_cache import FinishedTransfer
from octavo.offload import peer_storage
from octavo.offload.block_folder import DamagedBlockError
from octavo.offload.peer_storage import MISS_REASONS, PeerStorage
from octavo.offload.shared_blocks import MissingBlockError

SIZE, PLACES = 64, 12
KEYS = following_keys(root_key(""), range(40), 4)


class Peer:
    is_open = True

    """The blocks of a replica, as a table; ``error`` is what reading raises."""

    def __init__(self):
        self.blocks = {}
        self.error = None

    def __contains__(self, name):
        return name in self.blocks

    def write(self, name, content):
        self.blocks[name] = bytes(content)

    def read(self, name, content, ahead=()):
        if self.error is not None:
            raise self.error
        if name not in self.blocks:
            raise MissingBlockError
        content[:] = self.blocks[name]

    def close(self):
        pass


@pytest.fixture
def rows():
    return [memoryview(bytearray([place] * SIZE)) for place in range(PLACES)]


@pytest.fixture
def peer():
    return Peer()


@pytest.fixture
def storage(rows, peer, monkeypatch):
    storage = PeerStorage(rows, b"model", None, {0: peer})
    yield storage
    storage.close()


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(peer_storage, "_PATIENCE_SECONDS", 0.05)


def name_of(storage, key):
    return storage._name(key)


def put(storage, peer, key, content=b"\7" * SIZE):
    peer.blocks[name_of(storage, key)] = content


def finished(storage, count):
    found = []
    while len(found) < count:
        found += storage.finished_transfers()
        storage.wait(0.01)
    return found


def misses(storage):
    counts = {reason: storage.figures[f"kv_transfer_misses_{reason}"] for reason in MISS_REASONS}
    return {reason: count for reason, count in counts.items() if count}


def test_a_block_of_a_peer_is_read(storage, peer, rows):
    assert KEYS[0] not in storage and storage.room == 0 and not storage.is_stuck
    put(storage, peer, KEYS[0])
    assert KEYS[0] in storage
    storage.read(KEYS[0], 3)
    assert finished(storage, 1) == [FinishedTransfer(3, is_read=True, is_good=True)]
    assert rows[3] == b"\7" * SIZE
    assert storage.figures["kv_transfer_bytes_received"] == SIZE and not misses(storage)
    assert not storage.wait(0.0)


def test_who_computes_no_prompts_writes_nothing(storage):
    assert not storage.write(KEYS[0], 0)


def test_what_is_written_is_found_again(rows):
    own = Peer()
    storage = PeerStorage(rows, b"model", own, {})
    assert storage.room == PLACES
    assert storage.write(KEYS[0], 5)
    assert finished(storage, 1) == [FinishedTransfer(5, is_read=False, is_good=True)]
    assert KEYS[0] in storage and own.blocks == {name_of(storage, KEYS[0]): bytes([5] * SIZE)}
    storage.read(KEYS[0], 1)
    finished(storage, 1)
    assert rows[1] == bytes([5] * SIZE)
    assert storage.figures["kv_transfer_bytes_sent"] == SIZE
    storage.close()


def test_blocks_of_other_models_are_not_seen(storage, peer, rows):
    other = PeerStorage(rows, b"another model", None, {0: peer})
    put(storage, peer, KEYS[0])
    assert KEYS[0] in storage and KEYS[0] not in other
    other.close()


def test_what_is_on_its_way_is_waited_for(storage, peer, rows):
    storage.expect(0, KEYS)
    assert all(key in storage for key in KEYS)
    assert part_key(KEYS[0], 1) in storage  # of any group of layers
    storage.read(KEYS[0], 0)
    storage.read(KEYS[1], 1)
    put(storage, peer, KEYS[1])  # comes first
    assert finished(storage, 1) == [FinishedTransfer(1, is_read=True, is_good=True)]
    assert storage.wait(0.0)  # the other is still under way
    put(storage, peer, KEYS[0])
    assert finished(storage, 1) == [FinishedTransfer(0, is_read=True, is_good=True)]
    assert not misses(storage)


def test_what_does_not_come_is_not_waited_for_long(hasty, storage):
    storage.expect(0, KEYS)
    storage.read(KEYS[0], 0)
    assert finished(storage, 1) == [FinishedTransfer(0, is_read=True, is_good=False)]
    assert misses(storage) == {"late": 1}
    assert KEYS[1] not in storage


def test_what_a_dead_peer_had_announced_is_not_waited_for(storage, peer):
    storage.expect(0, KEYS)
    put(storage, peer, KEYS[1])
    storage.read(KEYS[0], 0)
    storage.peer_ended(0)
    assert finished(storage, 1) == [FinishedTransfer(0, is_read=True, is_good=False)]
    assert misses(storage) == {"peer_ended": 1}
    assert KEYS[0] not in storage
    assert KEYS[1] in storage  # this one had been written


def test_announcements_of_strangers_count_for_nothing(storage):
    storage.expect(7, KEYS)
    assert KEYS[0] not in storage


def test_no_more_announcements_are_remembered_than_a_bound(storage, monkeypatch):
    monkeypatch.setattr(peer_storage, "_MOST_EXPECTED", 4)
    storage.expect(0, KEYS)
    assert [key in storage for key in KEYS] == [False] * 6 + [True] * 4
    storage.expect(0, KEYS[:2])
    assert [key in storage for key in KEYS] == [True] * 2 + [False] * 6 + [True] * 2


@pytest.mark.parametrize(
    "error, reason",
    [
        (MissingBlockError(), "overwritten"),
        (DamagedBlockError("a bit has flipped"), "damaged"),
        (ConnectionError("no route"), "unreachable"),
        (RuntimeError("a mistake"), "unreachable"),
    ],
)
def test_what_cannot_be_read_is_a_miss(storage, peer, error, reason, caplog):
    put(storage, peer, KEYS[0])
    peer.error = error
    storage.read(KEYS[0], 2)
    assert finished(storage, 1) == [FinishedTransfer(2, is_read=True, is_good=False)]
    assert misses(storage) == {reason: 1}
    assert storage.num_errors == (reason != "overwritten")
    assert bool(caplog.text) == (reason != "overwritten")


def test_what_is_gone_when_it_is_read_is_a_miss(storage):
    storage.read(KEYS[0], 2)
    assert finished(storage, 1) == [FinishedTransfer(2, is_read=True, is_good=False)]
    assert misses(storage) == {"overwritten": 1}


def test_a_slow_read_is_forgotten_after_a_while(storage, peer, monkeypatch):
    first = storage.read_seconds
    seconds = itertools.count(100.0, 5.0)
    monkeypatch.setattr(peer_storage.time, "perf_counter", lambda: next(seconds))
    put(storage, peer, KEYS[0])
    storage.read(KEYS[0], 3)
    finished(storage, 1)
    slow, later = storage.read_seconds, time.monotonic() + 3600
    assert slow > 0.5
    monkeypatch.setattr(peer_storage.time, "monotonic", lambda: later)
    assert storage.read_seconds == pytest.approx(first)


def test_a_source_without_a_link_is_not_waited_for(storage, peer):
    peer.is_open = False
    storage.expect(0, KEYS)
    assert KEYS[0] not in storage
    peer.is_open = True
    storage.expect(0, KEYS)
    storage.read(KEYS[0], 0)
    peer.is_open = False
    assert finished(storage, 1) == [FinishedTransfer(0, is_read=True, is_good=False)]
    assert misses(storage) == {"unreachable": 1}


def test_its_thread_ends_with_it(rows, peer):
    before = threading.active_count()
    storage = PeerStorage(rows, b"model", None, {0: peer})
    storage.expect(0, KEYS)
    storage.read(KEYS[0], 0)
    thread = storage._thread
    del storage
    thread.join(10)
    assert not thread.is_alive() and threading.active_count() == before


@pytest.mark.parametrize("seed", range(4))
def test_every_read_ends_once_whatever_happens(hasty, rows, peer, seed):
    rng = random.Random(seed)
    storage = PeerStorage(rows, b"model", None, {0: peer, 1: Peer()})
    free, under_way, ended = list(range(PLACES)), {}, 0
    for turn in range(400):
        action, key = rng.randrange(6), rng.choice(KEYS)
        if action == 0:
            storage.expect(rng.randrange(3), rng.sample(KEYS, 3))
        elif action == 1:
            put(storage, peer, key, bytes([turn % 256]) * SIZE)
        elif action == 2:
            peer.blocks.pop(name_of(storage, key), None)
        elif action == 3 and rng.random() < 0.1:
            storage.peer_ended(rng.randrange(2))
        elif free:
            place = free.pop()
            under_way[place] = key
            storage.read(key, place)
        else:
            storage.wait(0.01)
        for place, is_read, _ in storage.finished_transfers():
            assert is_read and under_way.pop(place)
            free.append(place)
            ended += 1
    finished_ones = finished(storage, len(under_way))
    assert sorted(each.place for each in finished_ones) == sorted(under_way)
    assert not storage.wait(0.0) and ended + len(finished_ones) > 50
    storage.close()
