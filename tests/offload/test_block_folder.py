from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from octavo.base.errors import ConfigError
from octavo.offload import block_folder as folder_module
from octavo.offload.block_folder import BlockFolder, DamagedBlockError, FolderBusyError

SIZE = 5000  # of a block: two units of a disk
UNITS = 2 * 4096


def name(index: int) -> str:
    return sha256(str(index).encode()).hexdigest()


def content(index: int) -> memoryview:
    return memoryview(bytearray(random.Random(index).randbytes(SIZE)))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def open_folder(path):
    """Opens it as often as is asked, each time as the only one."""
    opened: list[BlockFolder] = []

    def create(max_bytes: int = 100 * UNITS) -> BlockFolder:
        while opened:
            opened.pop().close()
        opened.append(BlockFolder(path, max_bytes))
        return opened[0]

    yield create
    for each in opened:
        each.close()


def read(folder: BlockFolder, index: int) -> bytes:
    found = memoryview(bytearray(SIZE))
    folder.read(name(index), found)
    return bytes(found)


def files(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file() and each.name != "octavo-kv"]


def bytes_on_disk(path: Path) -> int:
    return sum(-(-each.stat().st_size // 4096) * 4096 for each in files(path))


def test_what_is_written_is_read_again_by_the_next_engine(open_folder):
    folder = open_folder()
    for index in range(3):
        folder.write(name(index), content(index))
    for opened in (folder, open_folder()):
        assert len(opened) == 3 and name(7) not in opened
        assert [read(opened, index) for index in range(3)] == [content(i) for i in range(3)]


def test_it_never_takes_more_than_it_may(open_folder, path):
    folder = open_folder(4 * UNITS)
    for index in range(10):
        folder.write(name(index), content(index))
        assert bytes_on_disk(path) == folder.num_bytes <= 4 * UNITS
    assert [name(index) in folder for index in range(10)] == [False] * 6 + [True] * 4
    assert len(open_folder(2 * UNITS)) == 2 and bytes_on_disk(path) == 2 * UNITS


def test_what_was_used_last_stays_over_a_restart_too(open_folder, path):
    folder = open_folder(3 * UNITS)
    for index in range(3):
        folder.write(name(index), content(index))
        os.utime(path / name(index)[:2] / name(index)[2:], (index, index))
    read(folder, 0)
    folder = open_folder(3 * UNITS)
    folder.write(name(3), content(3))
    assert [name(index) in folder for index in range(4)] == [True, False, True, True]


def test_a_block_that_is_larger_than_all_is_not_written(open_folder, path):
    open_folder(UNITS - 1).write(name(0), content(0))
    assert files(path) == []


def test_nobody_else_can_read_it(open_folder, path):
    path.mkdir(mode=0o755)
    open_folder().write(name(0), content(0))
    for each in [path, *path.rglob("*")]:
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_found(open_folder, path, seed):
    folder, rng = open_folder(), random.Random(seed)
    folder.write(name(0), content(0))
    (file,) = files(path)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    with pytest.raises(DamagedBlockError):
        read(folder, 0)
    assert name(0) not in folder and files(path) == [] and folder.num_bytes == 0


@pytest.mark.parametrize("size", [0, 1, 16, 17, SIZE, SIZE + 15, SIZE + 17, 2 * SIZE])
def test_a_file_of_another_size_is_found(open_folder, path, size):
    folder = open_folder()
    folder.write(name(0), content(0))
    (file,) = files(path)
    with open(file, "r+b") as opened:
        opened.truncate(size)
    with pytest.raises(DamagedBlockError):
        read(folder, 0)


def test_a_block_in_the_place_of_another_is_found(open_folder, path):
    folder = open_folder()
    folder.write(name(0), content(0))
    (file,) = files(path)
    folder.write(name(1), content(1))
    (path / name(1)[:2] / name(1)[2:]).write_bytes(file.read_bytes())
    with pytest.raises(DamagedBlockError):
        read(folder, 1)


def test_what_somebody_removed_is_not_there(open_folder, path):
    folder = open_folder()
    folder.write(name(0), content(0))
    files(path)[0].unlink()
    with pytest.raises(FileNotFoundError):
        read(folder, 0)
    assert name(0) not in folder


@pytest.mark.parametrize("fails_at", range(5))
def test_a_full_disk_leaves_no_half_of_a_block(open_folder, path, monkeypatch, fails_at):
    """Whichever write it is that fails; some take only a part of what they are given."""
    folder, num_writes, write = open_folder(), 0, os.write
    folder.write(name(0), content(0))

    def write_some(descriptor: int, data: memoryview) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:1500])

    monkeypatch.setattr(folder_module.os, "write", write_some)
    with pytest.raises(OSError, match="No space left"):
        folder.write(name(1), content(1))
    monkeypatch.undo()
    assert len(files(path)) == 1 and name(1) not in folder and folder.num_bytes == UNITS
    assert read(folder, 0) == content(0)
    folder.write(name(1), content(1))
    assert read(folder, 1) == content(1)


def test_one_engine_has_it_and_the_next_is_told(open_folder, path):
    open_folder()
    with pytest.raises(FolderBusyError, match="another engine has it"):
        BlockFolder(path, UNITS)


def test_what_is_not_ours_is_left_alone(path):
    path.mkdir(mode=0o755)
    (path / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files in it"):
        BlockFolder(path, UNITS)
    assert (path / "letter.txt").read_text() == "mine"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_a_file_is_no_folder(path):
    path.write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        BlockFolder(path, UNITS)


_WRITER = """
import random, sys
from hashlib import sha256
from pathlib import Path
from octavo.offload.block_folder import BlockFolder
folder = BlockFolder(Path(sys.argv[1]), 40 * 8192)
print("ready", flush=True)
for index in range(10**9):
    content = bytearray(random.Random(index).randbytes(5000))
    folder.write(sha256(str(index).encode()).hexdigest(), memoryview(content))
"""


def test_a_killed_engine_leaves_a_folder_that_opens_and_is_right(path):
    rng, indices = random.Random(0), {name(index): index for index in range(20_000)}
    command = [sys.executable, "-c", _WRITER, str(path)]
    num_blocks = 0
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
        folder = BlockFolder(path, 40 * UNITS)
        try:
            assert bytes_on_disk(path) == folder.num_bytes <= 40 * UNITS
            for each in list(folder._sizes):
                assert read(folder, indices[each]) == content(indices[each])
                num_blocks += 1
        finally:
            folder.close()
    assert num_blocks > 0


# ---- Folders that somebody else has prepared


def test_a_folder_that_is_a_link_is_refused(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="kv is a symbolic link.*name the folder itself"):
        BlockFolder(path, UNITS)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_folder_below_a_link_is_none(tmp_path):
    """Where people have their disks is their business."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    BlockFolder(tmp_path / "link" / "kv", UNITS).close()
    assert (tmp_path / "disk" / "kv" / "octavo-kv").is_file()


def test_a_shard_that_is_a_link_is_refused(open_folder, path, tmp_path):
    """At the start; and where it becomes one meanwhile, nothing is written there."""
    folder, target = open_folder(), tmp_path / "elsewhere"
    target.mkdir()
    (path / name(0)[:2]).symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        folder.write(name(0), content(0))
    with pytest.raises(OSError, match="symbolic link"):
        read(folder, 0)
    assert not any(target.iterdir()) and files(path) == []
    with pytest.raises(ConfigError, match=f"{name(0)[:2]} is a symbolic link"):
        open_folder()


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "hard link", "folder"])
def test_what_is_no_file_of_ours_is_no_block(path, tmp_path, kind):
    """It is not read, nor waited for, nor written to; a block takes its place."""
    BlockFolder(path, UNITS).close()
    target = tmp_path / "letter.txt"
    target.write_text("mine")
    planted = path / name(0)[:2] / name(0)[2:]
    planted.parent.mkdir()
    match kind:
        case "link":
            planted.symlink_to(target)
        case "dangling link":
            planted.symlink_to(tmp_path / "nothing")
        case "fifo":
            os.mkfifo(planted)
        case "hard link":
            os.link(target, planted)
        case "folder":
            planted.mkdir()
    folder = BlockFolder(path, 10 * UNITS)
    assert name(0) not in folder and folder.num_bytes == 0
    with pytest.raises((OSError, DamagedBlockError)):  # even if it is asked
        folder._read(name(0), content(0))
    if kind == "folder":
        with pytest.raises(OSError):
            folder.write(name(0), content(0))
    else:
        folder.write(name(0), content(0))
        assert read(folder, 0) == content(0)
    assert target.read_text() == "mine" and target.stat().st_mode & 0o777 != 0o600
    assert not (tmp_path / "nothing").exists()
    folder.close()


@pytest.mark.parametrize("kind", ["link", "fifo", "hard link"])
@pytest.mark.parametrize("planted", ["octavo-kv", "part"])
def test_its_own_names_lead_nowhere_else(path, tmp_path, kind, planted):
    path.mkdir()
    target = tmp_path / "letter.txt"
    target.write_text("mine")
    (path / "octavo-kv").touch()
    (path / planted).unlink(missing_ok=True)
    match kind:
        case "link":
            (path / planted).symlink_to(target)
        case "fifo":
            os.mkfifo(path / planted)
        case "hard link":
            os.link(target, path / planted)
    if planted == "octavo-kv":
        with pytest.raises(ConfigError, match="octavo-kv"):
            BlockFolder(path, UNITS)
    else:
        folder = BlockFolder(path, UNITS)
        folder.write(name(0), content(0))
        assert read(folder, 0) == content(0)
        folder.close()
    assert target.read_text() == "mine"


def test_a_folder_of_another_user_is_refused(path, monkeypatch):
    BlockFolder(path, UNITS).close()
    us = os.geteuid()
    monkeypatch.setattr(folder_module.os, "geteuid", lambda: us + 1)
    with pytest.raises(ConfigError, match=f"kv belongs to another user \\({us}\\)"):
        BlockFolder(path, UNITS)


def test_files_of_another_user_are_no_blocks(open_folder, path, monkeypatch):
    open_folder().write(name(0), content(0))
    of_file, us = folder_module._is_own_file, os.geteuid()

    def as_if_of_another(status: os.stat_result) -> bool:
        is_block = status.st_size > 1000
        with monkeypatch.context() as patch:
            patch.setattr(folder_module.os, "geteuid", lambda: us + is_block)
            return of_file(status)

    monkeypatch.setattr(folder_module, "_is_own_file", as_if_of_another)
    assert name(0) not in open_folder()


def test_what_follows_a_block_goes_with_all_that_follows_it(open_folder, path):
    folder = open_folder()
    for index, before in [(3, 2), (2, 1), (4, 2), (5, None), (6, 5)]:
        folder.write(name(index), content(index), None if before is None else name(before))
    folder.forget_after(name(1))
    assert [index for index in range(7) if name(index) in folder] == [5, 6]
    assert bytes_on_disk(path) == folder.num_bytes == 2 * UNITS
    folder.forget(name(6))
    folder.forget(name(5))
    assert not folder._after and not folder._before
