"""Processes of followers: how they come up, that their end is noticed, and what is left of them."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError, EngineError, PeerEndedError
from octavo.kernels.cpu import library
from octavo.kernels.cpu.group import ShmGroup
from octavo.runtime.followers import Followers
from octavo.runtime.rank_memory import RankMemory
from octavo.runtime.rank_process import JsonConnection
from octavo.system.child_process import KEY_VARIABLE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="groups are of Linux"),
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
]
SECONDS = 60.0  # of which none is waited for where all is well


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Followers find what this process finds."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


@pytest.fixture
def start():
    """``start(3, does="steps")``: the home rank of a group of three, and its followers."""
    opened = []

    def begin(size: int, patience_s=0.0, **settings) -> tuple[ShmGroup, Followers]:
        memory = RankMemory(size, num_bytes=4 << 20, is_crowded=True)
        opened.append(memory)
        followers = Followers("follower_double", memory, settings, patience_s=patience_s)
        opened.append(followers)
        return memory.home.messages, followers

    begin.opened = opened
    yield begin
    for each in reversed(opened):
        each.close()


def until(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process has not ended: one that its parent has not read the status of has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def message(*words: int) -> array[int]:
    return array("i", words)


def step(group: ShmGroup, meetings: int) -> None:
    group.send(message(meetings))
    for _ in range(meetings):
        group.meet()


def test_they_come_up_with_their_settings_and_without_keys(start, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    group, followers = start(3, does="echoes")
    told = followers.receive()
    assert [each["rank"] for each in told] == [1, 2]
    assert all(KEY_VARIABLE not in each["environment"] for each in told)
    group.send(message(1, 2, 3))
    assert followers.receive() == [{"words": 6}, {"words": 6}]
    assert followers.failure is None


def test_steps_of_processes(start):
    group, followers = start(2, does="steps")
    for meetings in range(20):
        step(group, meetings)
    assert group.counts.meetings == sum(range(20))
    assert group.counts.messages == 20
    assert followers.failure is None


def test_a_rank_that_does_not_come_up_is_named_with_its_last_words(start, capfd):
    _, followers = start(3, does="refuses", who=2)
    with pytest.raises(PeerEndedError) as error:
        while True:  # what they said before
            followers.receive()
    assert str(error.value) == (
        "rank 2 of 3 ended with exit status 1; its last words:\n"
        "ConfigError: there is no room for this rank"
    )
    assert "ConfigError: there is no room for this rank\n" in capfd.readouterr().err


def test_a_module_that_cannot_be_imported_is_told(start, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    memory = RankMemory(2, num_bytes=4 << 20)
    followers = Followers("no_such_module", memory, {})
    with pytest.raises(PeerEndedError, match=r"rank 1 of 2 .*\n(.*\n)*.*No module named"):
        followers.receive()
    followers.close()
    memory.close()


def test_of_many_words_the_last_are_kept(start):
    _, followers = start(2, does="talks")
    followers.receive()
    with pytest.raises(PeerEndedError, match="exit status 7") as error:
        followers.receive()
    words = str(error.value).splitlines()[1:]
    assert words == [*(f"line {number}" for number in range(981, 1000)), "half a line"]


def test_one_that_returns_has_ended_too(start):
    group, followers = start(2, does="returns")
    followers.receive()
    with pytest.raises(PeerEndedError):
        group.meet()
    until(lambda: followers.failure is not None)
    assert str(followers.failure) == "rank 1 of 2 ended with exit status 0, without a word"


def test_what_the_system_refuses_leaves_nothing(monkeypatch):
    gc.collect()  # groups of other tests, which would close their descriptors in between
    before = set(os.listdir("/proc/self/fd"))
    memory = RankMemory(3, num_bytes=4 << 20)
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    with pytest.raises(ConfigError, match="no process for rank 1 of 3: .*No such file"):
        Followers("follower_double", memory, {})
    memory.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_close_ends_them_even_if_they_are_stopped_and_leaves_nothing(start):
    gc.collect()  # groups of other tests, which would close their descriptors in between
    files = set(os.listdir("/proc/self/fd"))
    group, followers = start(3, does="hangs")
    followers.receive()
    pids = followers.pids
    os.kill(pids[1], signal.SIGSTOP)
    followers.close()
    followers.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(PeerEndedError):
        group.meet()
    with pytest.raises(EngineError, match="have been ended"):
        followers.receive()
    memory, _ = start.opened
    memory.close()
    memory.close()
    assert set(os.listdir("/proc/self/fd")) == files
    assert "octavo-group" not in Path("/proc/self/maps").read_text()
    assert "octavo-followers" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_is_killed_at_any_moment_ends_the_group(start, seed):
    chosen = random.Random(seed)
    group, followers = start(3, does="steps")
    followers.receive()
    victim = chosen.randrange(2)
    pids = followers.pids
    kill = threading.Timer(chosen.random() / 20, os.kill, (pids[victim], signal.SIGKILL))
    kill.start()
    with pytest.raises(PeerEndedError):
        while True:
            step(group, chosen.randrange(30))
    kill.join()
    until(lambda: followers.failure is not None)
    assert str(followers.failure).startswith(f"rank {victim + 1} of 3 ended with signal 9")
    until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("is_stopped", [True, False])
def test_an_awaited_one_that_does_nothing_is_ended(start, is_stopped):
    group, followers = start(3, patience_s=0.5, does="hangs")
    followers.receive()
    pids = followers.pids
    if is_stopped:
        os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(PeerEndedError, match="^rank 1 of 3 was ended, as it had done nothing for"):
        followers.receive()
    until(lambda: not any(map(is_running, pids)))
    with pytest.raises(PeerEndedError):
        group.meet()


def test_an_awaited_one_that_is_at_work_is_waited_for(start):
    _, followers = start(2, patience_s=0.5, does="works", seconds=1.5)
    followers.receive()
    assert followers.receive() == [{"worked": True}]


# A home rank whose followers wait: for a message, or for it to come to a meeting.
HOME = """
import sys, time
from array import array
from octavo.runtime.followers import Followers
from octavo.runtime.rank_memory import RankMemory

memory = RankMemory(3, num_bytes=4 << 20)
followers = Followers("follower_double", memory, {"does": "steps"})
group = memory.home.messages
followers.receive()
for _ in range(10):
    group.send(array("i", [1]))
    group.meet()
if sys.argv[1] == "meeting":
    group.send(array("i", [1]))
print(*followers.pids, flush=True)
time.sleep(600)
"""


@pytest.fixture
def home():
    """``home("message")``: a process that is the home rank, and the pids of its followers."""
    started = []

    def begin(waits_for: str) -> tuple[subprocess.Popen, list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOME, waits_for], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("waits_for", ["message", "meeting"])
def test_followers_end_with_a_home_rank_that_is_killed(home, waits_for):
    process, pids = home(waits_for)
    assert all(map(is_running, pids))
    process.kill()
    process.wait()
    until(lambda: not any(map(is_running, pids)))


def test_a_stopped_follower_is_waited_for_and_ends_with_the_home_rank(home):
    process, pids = home("message")
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    process.wait()
    until(lambda: not any(map(is_running, pids)))


def test_the_home_rank_waits_for_a_stopped_one_and_goes_on_with_it(start):
    group, followers = start(2, does="steps")
    followers.receive()
    os.kill(followers.pids[0], signal.SIGSTOP)
    done = threading.Event()

    def run() -> None:
        step(group, 5)
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert not done.wait(0.3)
    os.kill(followers.pids[0], signal.SIGCONT)
    assert done.wait(SECONDS)
    thread.join()


def test_a_follower_whose_parent_has_ended_before_it_could_ask_ends():
    done = subprocess.run(
        [sys.executable, "-m", "octavo.runtime.rank_process", "os", "0", "1", "2", "0", "0"],
        timeout=SECONDS,
    )
    assert done.returncode == 1


def test_lines_of_json_arrive_in_any_pieces():
    import socket

    ours, theirs = socket.socketpair()
    connection = JsonConnection(ours)
    theirs.sendall(b'{"a": ')
    theirs.sendall(b'1}\n{"b": [2, ')
    assert connection.receive() == {"a": 1}
    theirs.sendall(b"3]}\n")
    assert connection.receive() == {"b": [2, 3]}
    theirs.close()
    assert connection.receive() is None
    connection.send({"dropped": 1})
    connection.close()
