"""A folder of KV blocks: a file each, checked when it is read, the oldest gone when it is full.

    DIR (0700)
        octavo-kv           locked by the engine that has the folder
        3f/
            a09c...         a block; its name is a hash of its key, and of what the key leaves open
                8 bytes     "octavokv"
                4 bytes     format, little-endian; 4 bytes: CRC-32 of the name and the content
                the rest    the content

A file is written under another name and then renamed, so an engine that is killed leaves whole
files, and parts that the next one takes away. After a loss of power, a file may be there without
what it had: then its checksum is wrong. It is not synced, since nothing is lost that cannot be
computed again. Any single change of up to 32 bits in a row is found, and of others all but one in
2^32.

Neither salts nor tokens are in names or files in clear. Keys and values do tell of the text that
they were computed from, so all is readable for its owner alone.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from octavo.errors import ConfigError
from octavo.files import lock

_LOCK = "octavo-kv"
_PART = "part"
_MAGIC, _FORMAT = b"octavokv", 1
_HEADER = struct.Struct("<8sII")
_DISK_UNIT = 4096  # that a file takes more of, or less, on most disks


class FolderBusyError(ConfigError):
    """Another engine has the folder, or nobody can say whether one has."""


class DamagedBlockError(Exception):
    """A file is not as it was written."""


class BlockFolder:
    """Holds a folder until it is closed. Not thread-safe, but for ``in``.

    Args:
        max_bytes: that its files may take, one that is being written included.

    Raises:
        FolderBusyError: another engine has it.
        ConfigError: it cannot be used, or has something else in it.
    """

    def __init__(self, path: Path, max_bytes: int):
        self.path, self.max_bytes = path, max_bytes
        self.num_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by name, used longest ago first
        try:
            self._lock = _own(path)
            self._look_around()
        except OSError as error:
            raise ConfigError(f"kv_offload: {path} cannot be used: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def write(self, name: str, content: memoryview) -> None:
        """Keep a block, and forget as many others as have to make room. OSError if it cannot be."""
        size = _on_disk(_HEADER.size + len(content))
        if name in self._sizes or size > self.max_bytes:
            return
        while self.num_bytes + size > self.max_bytes:
            self.forget(next(iter(self._sizes)))
        header = _HEADER.pack(_MAGIC, _FORMAT, _checksum(name, content))
        part, path = self.path / _PART, self._path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                _write_all(file.fileno(), header)
                _write_all(file.fileno(), content)
            os.replace(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise
        self._sizes[name] = size
        self.num_bytes += size

    def read(self, name: str, content: memoryview) -> None:
        """Fill ``content`` with a block, which is then the one used last.

        Raises:
            DamagedBlockError: it is not as it was written; it is forgotten. What is in ``content``
                means nothing.
            OSError: it is not there any more, or cannot be read; it is forgotten too.
        """
        try:
            self._read(name, content)
        except (OSError, DamagedBlockError):
            self.forget(name)
            raise
        self._sizes.move_to_end(name)

    def _read(self, name: str, content: memoryview) -> None:
        header = bytearray(_HEADER.size)
        path = self._path(name)
        with open(path, "rb", buffering=0) as file:
            whole = file.readinto(header) == len(header) and file.readinto(content) == len(content)
            if not whole or file.read(1):
                raise DamagedBlockError(f"{path} has another size than it was written with")
        magic, format, checksum = _HEADER.unpack(header)
        if (magic, format) != (_MAGIC, _FORMAT) or checksum != _checksum(name, content):
            raise DamagedBlockError(f"{path} is not as it was written")
        os.utime(path)  # by which the next engine knows when it was used

    def forget(self, name: str) -> None:
        """Remove a block, if it is there."""
        self.num_bytes -= self._sizes.pop(name, 0)
        with suppress(OSError):
            self._path(name).unlink()

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock)

    def _look_around(self) -> None:
        """What is there already, and room for it: the limit may have been larger before."""
        found: list[tuple[int, str, int]] = []
        for shard, entry in _files(self.path):
            if entry.name == _PART:
                os.unlink(entry.path)  # of an engine that was killed
            elif shard is not None:
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, shard + entry.name, _on_disk(status.st_size)))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self.forget(next(iter(self._sizes)))

    def _path(self, name: str) -> Path:
        return self.path / name[:2] / name[2:]


def _own(path: Path) -> int:
    """Make a folder that is ours alone, and lock it. Returns what holds the lock."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (path / _LOCK).exists() and any(path.iterdir()):
        raise ConfigError(f"kv_offload: {path} has other files in it: name a folder of its own")
    os.chmod(path, 0o700)
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        busy = isinstance(error, BlockingIOError)
        why = "another engine has it" if busy else f"it cannot be locked ({error})"
        raise FolderBusyError(f"kv_offload: {path}: {why}") from error
    return descriptor


def _files(path: Path) -> Iterator[tuple[str | None, os.DirEntry[str]]]:
    """The files of a folder, with the name of the shard that each is in."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                yield None, entry
            elif len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
                with os.scandir(entry.path) as shard:
                    yield from ((entry.name, each) for each in shard)


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _checksum(name: str, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(name.encode()))


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _DISK_UNIT) * _DISK_UNIT
