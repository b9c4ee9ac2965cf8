"""Groups of ranks: csrc/group.cpp, from C++ as steps use it, and ShmGroup with ranks in threads."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from octavo.base.errors import ConfigError, EngineError, PeerEndedError
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.group import GroupCounts, ShmGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="groups are of Linux")
LONG = 2**31 - 1  # rounds: minutes at the least
HEADER_BYTES, SLOT_BYTES, NUM_SLOTS = 65536, 65536, 16
GATE_BYTES = 64  # size, arrived, phase, written, what each rank has read


@pytest.fixture
def stress(compile_stress):
    """``stress(ranks, threads, rounds, is_crowded, flags)`` runs group_stress.cpp."""
    return compile_stress("group_stress.cpp")


@pytest.mark.parametrize(
    ("ranks", "threads", "rounds", "is_crowded"),
    [(1, 2, 100, 0), (2, 1, 500, 0), (2, 2, 200, 1), (3, 2, 100, 1), (4, 1, 100, 0)],
)
def test_it_keeps_its_promises(stress, ranks, threads, rounds, is_crowded):
    done = stress(ranks, threads, rounds, is_crowded)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("ranks", "threads"), [(2, 2), (3, 1)])
def test_the_thread_sanitizer_finds_no_race(stress, ranks, threads):
    try:
        done = stress(ranks, threads, 100, 1, flags=["-fsanitize=thread"])
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no thread sanitizer")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def make_group(native):
    """``make_group(3)``: all ranks of a group of three, each of which has mapped the memory."""
    opened: list[ShmGroup] = []

    def make(size: int, num_bytes: int = 4 << 20) -> list[ShmGroup]:
        options = {"is_crowded": True, "library": native.library}
        home = ShmGroup.create(size, num_bytes=num_bytes, **options)
        opened.append(home)
        for rank in range(1, size):
            opened.append(ShmGroup.attach(os.dup(home.fd), rank, size, **options))
        return opened[-size:]

    yield make
    for group in opened:
        group.close()


def together(groups: list[ShmGroup], act: Callable[[ShmGroup], object]) -> list[object]:
    """Run a function as all ranks; returns what each returned."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(act, groups))


def words(*numbers: int) -> array[int]:
    return array("i", numbers)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_get_the_answer_of_a_meeting(make_group, size):
    groups = make_group(size)
    assert together(groups, lambda group: group.meet()) == [False] * size
    assert together(groups, lambda group: group.meet(group.rank == size - 1)) == [True] * size
    assert together(groups, lambda group: group.meet()) == [False] * size
    assert [group.counts for group in groups] == [GroupCounts(3, 0, 0)] * size


def test_messages_of_any_length_go_to_all_followers(make_group):
    groups = make_group(3)
    sent = [words(*range(count)) for count in (1, 40, 16_368, 16_369, 400_000)]

    def act(group: ShmGroup) -> list[array[int]]:
        if group.rank == 0:
            for message in sent:
                group.send(message)
            return sent
        return [words(*group.receive()) for _ in sent]

    assert together(groups, act) == [sent] * 3
    counts = GroupCounts(0, len(sent), 4 * sum(map(len, sent)))
    assert [group.counts for group in groups] == [counts] * 3


def test_who_sends_and_who_receives(make_group):
    home, follower = make_group(2)
    with pytest.raises(EngineError, match="a message of 1 words by rank 1: rank 0 sends"):
        follower.send(words(1))
    with pytest.raises(EngineError, match="a message of 0 words by rank 0: .* one word at least"):
        home.send(words())
    with pytest.raises(EngineError, match="rank 0 sends messages, and receives none"):
        home.receive()


def test_a_message_for_which_there_is_no_room(native, make_group):
    home, follower = make_group(2)
    home.send(words(1, 2, 3))
    room = words(0, 9)
    code = native.lib.oct_group_receive(follower, room.buffer_info()[0], 1)
    assert code == abi.OCT_ERR_ARGUMENT
    assert native.library.last_error() == "a message of 3 words: there is room for 1"
    assert list(room) == [0, 9]


def test_ranks_that_allocate_alike_share_memory(make_group):
    groups = make_group(3)
    arrays = [[group.allocate(num_bytes) for num_bytes in (5, 100, 64)] for group in groups]
    starts = {tuple(a.ctypes.data - own[0].ctypes.data for a in own) for own in arrays}
    assert starts == {(0, 64, 192)}
    assert all(a.ctypes.data % 64 == 0 and not a.any() for own in arrays for a in own)
    arrays[2][1][:] = 7
    assert (arrays[0][1] == 7).all() and not arrays[0][0].any() and not arrays[1][2].any()
    with pytest.raises(ConfigError, match=r"a group of 3 ranks shares 4,194,304 bytes, of which"):
        groups[0].allocate(4 << 20)
    assert len(groups[0].allocate(1)) == 1


def test_memory_stays_as_long_as_an_array_of_it_is_used(make_group):
    home, follower = make_group(2)
    ours, theirs = home.allocate(100), follower.allocate(100)
    home.close()
    ours[:] = 3
    assert (theirs == 3).all()


def test_memory_is_taken_as_it_is_written():
    """64 GB of addresses take none; a small message takes a page."""
    home = ShmGroup.create(2)
    with home, ShmGroup.attach(os.dup(home.fd), 1, 2) as follower:
        for _ in range(100):
            home.send(words(1, 2, 3))
            follower.receive()
        home.allocate(8 << 30)
        assert os.fstat(home.fd).st_size == 64 << 30
        assert os.fstat(home.fd).st_blocks * 512 <= 4 * HEADER_BYTES


def test_the_size_of_the_memory_cannot_be_changed(make_group):
    (home,) = make_group(1)
    for size in (0, 64 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(home.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(home.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_cannot_be_a_group(native, make_group, monkeypatch):
    (home,) = make_group(1)
    for size in (0, 257):
        with pytest.raises(EngineError, match=f"a group of {size} ranks: 1 to 256 are possible"):
            ShmGroup.create(size, library=native.library)
    for rank, size, why in ((2, 2, "ranks are 0 to 1"), (1, 3, "of a group of 1 ranks")):
        fd = os.dup(home.fd)
        with pytest.raises(EngineError, match=why):
            ShmGroup.attach(fd, rank, size, library=native.library)
        os.close(fd)
    for call in (native.lib.oct_group_send, native.lib.oct_group_receive):
        assert call(None, None, 1) == abi.OCT_ERR_ARGUMENT
    assert native.lib.oct_group_meet(None, 0) == abi.OCT_ERR_ARGUMENT
    native.lib.oct_group_abort(None)
    native.lib.oct_group_close(None)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="only on Linux"):
        ShmGroup.create(2, library=native.library)


def test_nothing_is_left_of_what_the_system_refuses(native, monkeypatch):
    def left() -> tuple[set[str], int]:
        maps = Path("/proc/self/maps").read_text()
        return set(os.listdir("/proc/self/fd")), maps.count("octavo-group")

    before = left()

    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match="no memory that 2 processes share: no"):
        ShmGroup.create(2, library=native.library)
    monkeypatch.undo()
    with pytest.raises(EngineError):
        ShmGroup.create(300, library=native.library)
    ShmGroup.create(2, library=native.library)  # dropped
    assert left() == before


def test_calls_of_a_closed_group_fail(make_group):
    (home,) = make_group(1)
    home.close()
    for call in (home.meet, lambda: home.send(words(1))):
        with pytest.raises(EngineError, match="the group is NULL"):
            call()
    home.abort()
    assert home.counts == GroupCounts(0, 0, 0)


# -- ends --------------------------------------------------------------------------------------


def test_an_abort_ends_all_waiting_at_once_and_for_ever(make_group):
    groups = make_group(3)

    def act(group: ShmGroup) -> str:
        wait = group.receive if group.rank == 1 else group.meet
        with pytest.raises(PeerEndedError, match="a rank of the group has ended"):
            wait()
        return "ended"

    threads = ThreadPoolExecutor(3)
    waiting = [threads.submit(act, group) for group in groups]
    time.sleep(0.02)  # so long that they sleep
    groups[2].abort()
    assert [each.result() for each in waiting] == ["ended"] * 3
    threads.shutdown()
    for group in groups:
        with pytest.raises(PeerEndedError):
            group.meet()
    with pytest.raises(PeerEndedError):
        groups[0].send(words(1))
    with pytest.raises(PeerEndedError):
        groups[1].receive()


def test_a_ring_that_is_full_is_waited_for(make_group):
    home, follower = make_group(2)

    def fill() -> int:
        for number in range(100):
            home.send(words(number))
        return home.counts.messages

    with ThreadPoolExecutor(1) as threads:
        filling = threads.submit(fill)
        time.sleep(0.05)
        assert home.counts.messages == NUM_SLOTS
        assert [int(follower.receive()[0]) for _ in range(100)] == list(range(100))
        assert filling.result() == 100


@pytest.fixture
def call(native, make_group, make_pool):
    """``call(groups, rounds, pools)``: what a call of that many barriers returns in all ranks."""

    def run(groups: list[ShmGroup], rounds: int, pools: list) -> list[object]:
        barriers = native.lib.oct_group_barrier_ns
        return together(groups, lambda group: barriers(group, pools[group.rank], rounds))

    return run


def test_an_abort_of_a_call_of_one_rank_ends_it_in_all(call, make_group, make_pool):
    groups, pools = make_group(2), [make_pool(2), make_pool(1)]
    ended = threading.Event()

    def abort() -> None:
        while not ended.wait(0.01):  # until it has begun
            pools[1].abort()

    aborting = threading.Thread(target=abort)
    aborting.start()
    assert call(groups, LONG, pools) == [abi.OCT_ERR_ABORTED] * 2
    ended.set()
    aborting.join()
    assert all(nanoseconds > 0 for nanoseconds in call(groups, 10, pools))


def test_an_abort_of_the_group_ends_its_calls(native, call, make_group, make_pool):
    groups, pools = make_group(2), [make_pool(2), make_pool(1)]
    timer = threading.Timer(0.05, groups[1].abort)
    timer.start()
    assert call(groups, LONG, pools) == [abi.OCT_ERR_PEER] * 2
    timer.join()
    assert call(groups, 10, pools) == [abi.OCT_ERR_PEER] * 2
    assert native.lib.oct_group_meet_ns(groups[0], 5) == abi.OCT_ERR_PEER
    assert native.lib.oct_pool_barrier_ns(pools[0], 10) > 0  # the threads are well


def test_a_call_that_cannot_begin_does_not_hold_up_the_others(native, call, make_group, make_pool):
    groups = make_group(2)
    assert call(groups, 10, [make_pool(1), None]) == [abi.OCT_ERR_ABORTED, abi.OCT_ERR_ARGUMENT]
    assert call(groups, 0, [make_pool(1), make_pool(1)]) == [abi.OCT_ERR_ARGUMENT] * 2
    assert native.lib.oct_group_meet_ns(groups[0], 0) == abi.OCT_ERR_ARGUMENT


# -- damaged memory ----------------------------------------------------------------------------


def receive_all(follower: ShmGroup, room: np.ndarray) -> str:
    """What the receiver does with what is in the ring: it ends with an error, or waits for more,
    which an abort ends. It writes nothing behind its room."""
    timer = threading.Timer(0.05, follower.abort)
    timer.start()
    lib, capacity = follower._library.lib, len(room) - 16
    try:
        for _ in range(4 * NUM_SLOTS):
            code = lib.oct_group_receive(follower, room.ctypes.data, capacity)
            assert (room[capacity:] == 77).all()
            if code < 0:
                return follower._library.last_error()
            assert 1 <= code <= capacity
        raise AssertionError("more messages than the ring has")
    finally:
        timer.cancel()
        timer.join()


def damage(memory: np.ndarray, chosen: random.Random) -> None:
    """Overwrite a few words: of gates, of the beginnings of pieces, or anywhere in the ring."""
    view = memory[: HEADER_BYTES + NUM_SLOTS * SLOT_BYTES].view(np.int32)
    gates = [gate * GATE_BYTES // 4 for gate in (2, 3, 4, 5)]
    pieces = [
        (HEADER_BYTES + slot * SLOT_BYTES) // 4 + field for slot in range(3) for field in range(3)
    ]
    for _ in range(chosen.randrange(1, 4)):
        place = chosen.choice([*gates, *pieces, chosen.randrange(len(view))])
        view[place] = chosen.choice(
            [0, 1, -1, 2**31 - 1, -(2**31), chosen.randrange(-(2**31), 2**31), view[place] + 4]
        )


@pytest.mark.parametrize("seed", range(40))
def test_what_is_damaged_is_no_message(make_group, seed):
    home, follower = make_group(2)
    memory = np.frombuffer(home._memory.base, dtype=np.uint8)
    chosen = random.Random(seed)
    for _ in range(chosen.randrange(3)):
        home.send(words(*range(chosen.choice([1, 50, 20_000]))))
    damage(memory, chosen)
    error = receive_all(follower, np.full(25_016, 77, dtype=np.int32))
    assert "memory is damaged" in error or "there is room" in error or "has ended" in error


@pytest.mark.parametrize("seed", range(10))
def test_garbage_is_no_message(make_group, seed):
    home, follower = make_group(2)
    memory = np.frombuffer(home._memory.base, dtype=np.uint8)
    garbage = np.random.default_rng(seed)
    ring = memory[GATE_BYTES : HEADER_BYTES + NUM_SLOTS * SLOT_BYTES]
    ring[:] = garbage.integers(0, 256, len(ring), dtype=np.uint8)
    error = receive_all(follower, np.full(25_016, 77, dtype=np.int32))
    assert "memory is damaged" in error or "has ended" in error


def test_the_home_rank_notices_damage_too(make_group):
    home, _ = make_group(2)
    read = np.frombuffer(home._memory.base, dtype=np.uint32)[5 * GATE_BYTES // 4 :]
    read[0] = 400
    with pytest.raises(EngineError, match="rank 1 has .* messages unread in a ring of 16"):
        home.send(words(1))
