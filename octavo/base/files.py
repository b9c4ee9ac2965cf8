"""Files and folders that are whole, or not there at all.

They are written under another name beside their own, and renamed when they are done: no reader ever
finds half of one, and where writing fails or is interrupted, an old file stays as it was.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".octavo.part"
# A process that was killed leaves its file. It is known by its lock, which ended with the process;
# a file so young may not have been locked yet.
_YOUNG_SECONDS = 60.0
# Windows opens no folders, and syncs no file that is open for reading only.
_FOLDERS_OPEN = hasattr(os, "O_DIRECTORY")


class NewFile:
    """A file that takes the place of ``path`` when it is published, and is removed if it is not.

        with NewFile(path) as new:
            new.file.write(content)
            new.publish()

    ``file`` can be written anywhere, read and mapped. Folders are made if need be, and leftovers of
    killed processes for the same path are removed.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self.path)
        descriptor, self._name = tempfile.mkstemp(_SUFFIX, f"{self.path.name}.", self.path.parent)
        self.file: BinaryIO = os.fdopen(descriptor, "w+b")
        _lock(descriptor)

    def publish(self, *, mode: int = 0o644, sync: bool = False) -> None:
        """Close the file and put it in its place.

        ``sync``: only once it is on the disk, for files that took long to make.
        """
        self.file.flush()
        if sync:
            os.fsync(self.file.fileno())
        self.file.close()
        os.chmod(self._name, mode)
        os.replace(self._name, self.path)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # of data that could not be written either
            self.file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._name)


class NewFolder:
    """A folder that is at ``path`` once it is published, and is removed if it is not.

        with NewFolder(path) as new:
            (new.folder / "notes.txt").write_text(...)
            new.publish()

    It replaces no more than an empty folder. Leftovers of killed processes for the same path are
    removed.

    Raises:
        OSError: the folder cannot be written, or something else is there.
    """

    def __init__(self, path: str | Path):
        self.path = Path(os.path.abspath(Path(path).expanduser()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self.path)
        name = tempfile.mkdtemp(_SUFFIX, f"{self.path.name}.", self.path.parent)
        self.folder = Path(name)
        self._descriptor = os.open(name, os.O_RDONLY) if _FOLDERS_OPEN else None
        if self._descriptor is not None:
            _lock(self._descriptor)

    def publish(self) -> None:
        """Put the folder in its place, once all of it is on the disk."""
        for folder, _, names in os.walk(self.folder, topdown=False):
            for name in names:
                sync(os.path.join(folder, name))
            sync(folder)
        os.chmod(self.folder, 0o755)
        os.rename(self.folder, self.path)
        sync(self.path.parent)

    def __enter__(self) -> NewFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        shutil.rmtree(self.folder, ignore_errors=True)


def sync(path: str | Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk, where one can."""
    if not _FOLDERS_OPEN:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: str | Path, content: bytes) -> None:
    """Replace ``path`` by ``content``. OSError if it cannot be written."""
    with NewFile(path) as new:
        new.file.write(content)
        new.publish()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's contents, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Lock an open file, or a folder, until it is closed.

    Raises:
        BlockingIOError: another process holds it, and ``wait`` is False.
        OSError: it cannot be locked; ENOLCK where there are no locks: on some network file systems,
            and on Windows.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOLCK, "this system has no file locks of POSIX") from None
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _lock(descriptor: int) -> bool:
    """Lock a file if possible; returns whether it is certain that no other process holds it."""
    try:
        lock(descriptor)
    except OSError:
        return False
    return True


def _remove_leftovers(path: Path) -> None:
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if name.startswith(f"{path.name}.") and name.endswith(_SUFFIX):
            with suppress(OSError):  # removed meanwhile, or another user's
                _remove_if_left(path.parent / name)


def _remove_if_left(part: Path) -> None:
    if time.time() - part.stat().st_mtime < _YOUNG_SECONDS:
        return
    if not _FOLDERS_OPEN:  # nor are there the locks by which a leftover is known
        return
    descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if not _lock(descriptor):
            return
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()
    finally:
        os.close(descriptor)
