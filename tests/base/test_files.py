"""Files are whole or not there, and nothing is left of those that were not finished."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from octavo.base import files
from octavo.base.files import NewFile, NewFolder, replace_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_published(tmp_path):
    path = tmp_path / "a" / "b"
    with NewFile(path) as new:
        new.file.write(b"new")
        assert not path.exists()
        new.publish()
        assert path.read_bytes() == b"new"
    assert names(path.parent) == ["b"] and stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_raises_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "a"
    replace_file(path, b"old")
    with pytest.raises(error), NewFile(path) as new:
        new.file.write(b"half")
        raise error
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a"]


def test_what_is_not_published_was_not_wanted(tmp_path):
    with NewFile(tmp_path / "a") as new:
        new.file.write(b"half")
    assert names(tmp_path) == []


def test_it_can_be_mapped_and_be_of_its_owner_alone(tmp_path):
    with NewFile(tmp_path / "a") as new:
        new.file.truncate(8)
        with mmap.mmap(new.file.fileno(), 8) as memory:
            memory[:] = b"12345678"
        new.publish(mode=0o600, sync=True)
    assert (tmp_path / "a").read_bytes() == b"12345678"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


WRITE_AND_WAIT = """
import sys, time
from octavo.base.files import NewFile
with NewFile(sys.argv[1]) as new:
    print("written", flush=True)
    time.sleep(60)
"""


def age(folder, seconds=3600):
    for path in folder.glob("*.octavo.part"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_what_a_killed_process_left_is_taken_away(tmp_path):
    """By the next one that writes the same file, and only when the other is dead."""
    path = tmp_path / "a"
    (tmp_path / "a.of-others.part").write_text("")
    command = [sys.executable, "-c", WRITE_AND_WAIT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        age(tmp_path)
        replace_file(path, b"mine")
        assert len(names(tmp_path)) == 3  # it is still being written
        process.send_signal(signal.SIGKILL)
    replace_file(tmp_path / "b", b"other")
    assert len(names(tmp_path)) == 4
    replace_file(path, b"mine")
    assert names(tmp_path) == ["a", "a.of-others.part", "b"]


def test_a_file_that_was_just_made_may_not_be_locked_yet(tmp_path):
    young = tmp_path / "a.xyz.octavo.part"
    young.write_text("")
    replace_file(tmp_path / "a", b"")
    assert young.exists()
    age(tmp_path)
    replace_file(tmp_path / "a", b"")
    assert not young.exists()


def test_a_place_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        replace_file(tmp_path / "file" / "below", b"")


def test_a_folder_appears_when_it_is_published(tmp_path):
    path = tmp_path / "a" / "b"
    with NewFolder(path) as new:
        (new.folder / "below").mkdir()
        (new.folder / "below" / "file").write_text("x")
        assert not path.exists()
        new.publish()
    assert (path / "below" / "file").read_text() == "x" and names(path.parent) == ["b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_that_was_not_finished_is_gone(tmp_path, error):
    with pytest.raises(error), NewFolder(tmp_path / "a") as new:
        (new.folder / "file").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_a_folder_replaces_nothing_but_an_empty_one(tmp_path):
    (tmp_path / "empty").mkdir()
    with NewFolder(tmp_path / "empty") as new:
        (new.folder / "file").touch()
        new.publish()
    with pytest.raises(OSError), NewFolder(tmp_path / "empty") as new:
        new.publish()
    assert names(tmp_path) == ["empty"] and names(tmp_path / "empty") == ["file"]


def test_a_folder_that_a_killed_process_left_is_taken_away(tmp_path):
    left, young = tmp_path / "a.1.octavo.part", tmp_path / "a.2.octavo.part"
    for folder in (left, young):
        folder.mkdir()
        (folder / "half").touch()
    hour_ago = time.time() - 3600
    os.utime(left, (hour_ago, hour_ago))
    with NewFolder(tmp_path / "a") as held:
        os.utime(held.folder, (hour_ago, hour_ago))
        with NewFolder(tmp_path / "a"):
            assert not left.exists() and young.exists() and held.folder.exists()
    assert names(tmp_path) == [young.name]


def test_without_locks_and_folders_as_files(tmp_path, monkeypatch):
    """As on Windows: all is written, and nothing is taken for a leftover."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(files, "_FOLDERS_OPEN", False)
    left = tmp_path / "a.x.octavo.part"
    left.touch()
    os.utime(left, (0, 0))
    with NewFolder(tmp_path / "a") as new:
        (new.folder / "b").write_text("c")
        new.publish()
    assert (tmp_path / "a" / "b").read_text() == "c" and left.exists()
    with (tmp_path / "d").open("w") as file, pytest.raises(OSError) as error:
        files.lock(file.fileno())
    assert error.value.errno == errno.ENOLCK
