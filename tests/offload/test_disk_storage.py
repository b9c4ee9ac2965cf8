from __future__ import annotations

import errno
import gc
import math
import threading
import time
from unittest.mock import Mock

import pytest

from octavo.core.host_kv_cache import FinishedTransfer
from octavo.offload import block_folder as folder_module
from octavo.offload import disk_storage
from octavo.offload.block_folder import BlockFolder
from octavo.offload.disk_storage import DiskStorage

SIZE = 100


@pytest.fixture
def rows():
    return [memoryview(bytearray(SIZE)) for _ in range(4)]


@pytest.fixture
def open_storage(tmp_path, rows):
    opened: list[DiskStorage] = []

    def create(identity: bytes = b"model", folder=None) -> DiskStorage:
        folder = folder or BlockFolder(tmp_path / "kv", 1 << 20)
        opened.append(DiskStorage(folder, rows, identity))
        return opened[-1]

    yield create
    for each in opened:
        each.close()


def ended(storage: DiskStorage) -> list[FinishedTransfer]:
    """The transfers that finish until none is under way."""
    found: list[FinishedTransfer] = []
    while storage.wait(1.0):
        found += storage.finished_transfers()
    return found


def test_places_are_written_and_filled(open_storage, rows):
    storage = open_storage()
    rows[1][:] = b"x" * SIZE
    assert b"key" not in storage and storage.write(b"key", 1)
    assert ended(storage) == [FinishedTransfer(1, is_read=False, is_good=True)]
    assert b"key" in storage
    storage.read(b"key", 3)
    assert ended(storage) == [FinishedTransfer(3, is_read=True, is_good=True)]
    assert rows[3] == rows[1] and storage.num_errors == 0


def test_the_next_engine_of_the_model_has_it_and_one_of_another_has_not(open_storage, rows):
    storage = open_storage()
    rows[0][:] = b"x" * SIZE
    storage.write(b"key", 0)
    storage.close()
    assert b"key" in (same := open_storage())
    same.read(b"key", 2)
    assert ended(same)[0].is_good and rows[2] == rows[0]
    same.close()
    assert b"key" not in open_storage(b"another")


def test_damage_is_counted_and_said(open_storage, tmp_path, caplog):
    storage = open_storage()
    storage.write(b"key", 0)
    ended(storage)
    (file,) = (each for each in (tmp_path / "kv").glob("*/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    storage.read(b"key", 1)
    assert ended(storage) == [FinishedTransfer(1, is_read=True, is_good=False)]
    assert storage.num_errors == 1 and b"key" not in storage and "computed again" in caplog.text


def test_what_had_to_make_room_meanwhile_is_no_error(open_storage):
    storage = open_storage()
    storage.read(b"key", 1)
    assert (
        ended(storage) == [FinishedTransfer(1, is_read=True, is_good=False)]
        and storage.num_errors == 0
    )


class SlowFolder:
    """Does nothing before it may."""

    def __init__(self, error: OSError | None = None):
        self.may_go_on = threading.Event()
        self.done: list[str] = []
        self.error = error

    def __contains__(self, name: str) -> bool:
        return False

    def _do(self, what: str) -> None:
        self.may_go_on.wait()
        self.done.append(what)
        if self.error is not None:
            raise self.error

    def write(self, name: str, content: memoryview, before: str | None) -> None:
        self._do("write")

    def forget_after(self, name: str) -> None:
        self.done.append("forget after")

    def read(self, name: str, content: memoryview) -> None:
        self._do("read")

    def close(self) -> None:
        self.done.append("close")


def wait_until_closed(folder: SlowFolder) -> None:
    deadline = time.monotonic() + 10
    while "close" not in folder.done:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_until_busy(storage: DiskStorage) -> None:
    while storage._work._busy_since is None:
        time.sleep(0.001)


def test_reads_come_before_writes_and_too_many_writes_are_refused(open_storage):
    folder = SlowFolder()
    storage = open_storage(folder=folder)
    assert storage.write(b"a", 0)
    wait_until_busy(storage)
    assert storage.write(b"b", 1) and storage.write(b"c", 2)
    assert storage.room == 0 and not storage.write(b"d", 3)
    storage.read(b"e", 3)
    folder.may_go_on.set()
    assert len(ended(storage)) == 4 and folder.done == ["write", "read", "write", "write"]
    assert storage.room == 2


def test_nobody_writes_to_a_full_disk_for_a_while(open_storage, caplog):
    folder = SlowFolder(OSError(errno.ENOSPC, "No space left on device"))
    folder.may_go_on.set()
    storage = open_storage(folder=folder)
    storage.write(b"a", 0)
    assert ended(storage) == [FinishedTransfer(0, is_read=False, is_good=False)]
    assert storage.num_errors == 1 and "No space left" in caplog.text
    assert storage.room == 0 and not storage.write(b"a", 0)
    storage._work._paused_until = 0.0
    assert storage.write(b"a", 0)


def test_what_follows_a_block_that_cannot_be_kept_goes(open_storage, tmp_path, monkeypatch):
    """Blocks come from the last to the first; the disk is full after some of them."""
    storage = open_storage()
    folder = storage._folder
    keys = [bytes([index]) for index in range(6)]
    others = [b"x0", b"x1"]
    storage.write(others[1], 0, others[0])
    storage.write(others[0], 1)
    ended(storage)

    def write_from_last_to_first(first: int, last: int) -> None:
        for index in range(last, first - 1, -1):
            storage.write(keys[index], index % 4, keys[index - 1] if index else None)
            ended(storage)

    write_from_last_to_first(4, 5)
    assert keys[4] in storage and keys[5] in storage
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "_write_all", Mock(side_effect=full))
        write_from_last_to_first(3, 3)
    assert storage.room == 0 and not any(key in storage for key in keys)
    assert all(key in storage for key in others) and folder.num_bytes == 2 * 4096

    storage._work._paused_until = 0.0
    write_from_last_to_first(2, 5)
    storage._work._paused_until = math.inf  # full again, as another block found out
    write_from_last_to_first(0, 1)
    assert not any(key in storage for key in keys) and folder.num_bytes == 2 * 4096
    assert len([*(tmp_path / "kv").glob("??/*")]) == 2


def test_a_disk_that_does_not_answer_is_known(open_storage, monkeypatch):
    monkeypatch.setattr(disk_storage, "_STUCK_SECONDS", 0.02)
    folder = SlowFolder()
    storage = open_storage(folder=folder)
    storage.read(b"a", 0)
    wait_until_busy(storage)
    time.sleep(0.03)
    assert storage.is_stuck and storage.wait(0.001) and not storage.finished_transfers()
    folder.may_go_on.set()
    ended(storage)
    assert not storage.is_stuck


def test_its_end_writes_what_is_waiting(open_storage):
    folder = SlowFolder()
    folder.may_go_on.set()
    storage = open_storage(folder=folder)
    storage.write(b"a", 0)
    storage.write(b"b", 1)
    storage.close()
    assert folder.done == ["write", "write", "close"]


def test_its_end_waits_for_no_disk(open_storage, monkeypatch):
    monkeypatch.setattr(disk_storage, "_CLOSE_SECONDS", 0.02)
    folder = SlowFolder()
    storage = open_storage(folder=folder)
    storage.write(b"a", 0)
    storage.close()
    assert folder.done == []  # the disk is still at it
    folder.may_go_on.set()
    wait_until_closed(folder)


def test_one_that_is_forgotten_lets_go_of_its_folder(rows):
    folder = SlowFolder()
    folder.may_go_on.set()
    storage = DiskStorage(folder, rows, b"")
    storage.write(b"a", 0)
    del storage
    gc.collect()
    wait_until_closed(folder)


def test_what_reading_takes_is_learned(open_storage, tmp_path):
    storage = open_storage()
    first = storage.read_seconds
    storage.write(b"key", 0)
    ended(storage)
    for _ in range(3):
        storage.read(b"key", 1)
        ended(storage)
    assert storage.read_seconds != first and 0 < storage.read_seconds < 1
