"""A folder of KV blocks, each in a checksummed file; the oldest go when it is full.

    DIR (0700)
        octavo-kv           locked by the engine that uses the folder
        3f/
            a09c...         a block; its name is a hash of its key, and of what the key leaves open
                8 bytes     "octavokv"
                4 bytes     format, little-endian; 4 bytes: CRC-32 of the name and the content
                the rest    the content

A file is written under another name and then renamed, so an engine that is killed leaves whole
files, and parts that the next one removes. After a loss of power, a file may be there without its
content: then its checksum is wrong. It is not synced, since nothing is lost that cannot be computed
again. Any single change of up to 32 bits in a row is found, and of others all but one in 2^32.

Neither salts nor tokens are in names or files in clear. KV does tell of the text that it was
computed from, so all is readable for its owner alone.

Another user may have prepared the folder. So it, and each folder in it, is opened once, without
following links, and has to belong to the user who runs the engine; files are reached through these
folders, by ``dir_fd``, and only regular files of that user with no other name are read. Existing
files are never written to.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.base.files import lock

_LOCK = "octavo-kv"
_PART = "part"
_MAGIC, _FORMAT = b"octavokv", 1
_HEADER = struct.Struct("<8sII")
_DISK_UNIT = 4096  # bytes; most disks give files multiples of it
# Windows opens no folders, and has no locks either.
_FOLDERS_OPEN = hasattr(os, "O_DIRECTORY")
# A FIFO is opened without waiting for a writer.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC if _FOLDERS_OPEN else 0


class FolderBusyError(ConfigError):
    """Another engine uses the folder, or it cannot be known whether one does."""


class DamagedBlockError(Exception):
    """A stored block is not as it was written."""


class BlockFolder:
    """Holds a folder until it is closed. Not thread-safe, except for ``in``.

    Args:
        max_bytes: the most that its files may take, one that is being written included.

    Raises:
        FolderBusyError: another engine has it.
        ConfigError: it cannot be used, has other files in it, or is another user's.
    """

    def __init__(self, path: Path, max_bytes: int):
        self.path, self.max_bytes = path, max_bytes
        self.num_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by name, used longest ago first
        # Of blocks that were written here: the one before each, and those after each.
        self._before: dict[str, str] = {}
        self._after: dict[str, set[str]] = {}
        try:
            self._folder, self._lock = _own(path)
        except OSError as error:
            raise ConfigError(f"kv_offload: {path} cannot be used: {error}") from error
        try:
            self._look_around()
        except (OSError, ConfigError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"kv_offload: {path} cannot be used: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def write(self, name: str, content: memoryview, before: str | None = None) -> None:
        """Keep a block, and forget as many others as have to make room.

        ``before`` is the block without which this one is of no use, if there is one.

        Raises:
            OSError: it cannot be written.
        """
        size = _on_disk(_HEADER.size + len(content))
        if name in self._sizes or size > self.max_bytes:
            return
        while self.num_bytes + size > self.max_bytes:
            self.forget(next(iter(self._sizes)))
        header = _HEADER.pack(_MAGIC, _FORMAT, _checksum(name, content))
        with suppress(FileExistsError):
            os.mkdir(name[:2], 0o700, dir_fd=self._folder)
        try:
            with suppress(FileNotFoundError):
                os.unlink(_PART, dir_fd=self._folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY
            descriptor = os.open(_PART, flags, 0o600, dir_fd=self._folder)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                _write_all(file.fileno(), header)
                _write_all(file.fileno(), content)
            with self._shard_of(name) as shard:
                os.replace(_PART, name[2:], src_dir_fd=self._folder, dst_dir_fd=shard)
        except OSError:
            with suppress(OSError):
                os.unlink(_PART, dir_fd=self._folder)
            raise
        self._sizes[name] = size
        self.num_bytes += size
        if before is not None:
            self._before[name] = before
            self._after.setdefault(before, set()).add(name)

    def read(self, name: str, content: memoryview) -> None:
        """Fill ``content`` with a block, which then counts as the one used last.

        Raises:
            DamagedBlockError: it is not as it was written; it is forgotten, and ``content`` is
                invalid.
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
        path = self.path / name[:2] / name[2:]
        with self._shard_of(name) as shard:
            descriptor = os.open(name[2:], os.O_RDONLY | _SAFELY, dir_fd=shard)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not _is_own_file(os.fstat(descriptor)):
                raise DamagedBlockError(f"{path} is not a file that an engine of this user wrote")
            whole = file.readinto(header) == len(header) and file.readinto(content) == len(content)
            if not whole or file.read(1):
                raise DamagedBlockError(f"{path} has another size than it was written with")
            magic, format, checksum = _HEADER.unpack(header)
            if (magic, format) != (_MAGIC, _FORMAT) or checksum != _checksum(name, content):
                raise DamagedBlockError(f"{path} is not as it was written")
            os.utime(descriptor)  # tells the next engine when it was used

    def forget(self, name: str) -> None:
        """Remove a block, if it is there."""
        self.num_bytes -= self._sizes.pop(name, 0)
        before = self._before.pop(name, None)
        if before is not None:
            self._after[before].discard(name)
            if not self._after[before]:
                del self._after[before]
        with suppress(OSError), self._shard_of(name) as shard:
            os.unlink(name[2:], dir_fd=shard)

    def forget_after(self, name: str) -> None:
        """Remove the blocks that follow one that is not kept: none of them can be reached
        without it."""
        lost = [*self._after.get(name, ())]
        while lost:
            following = lost.pop()
            lost += self._after.get(following, ())
            self.forget(following)

    def close(self) -> None:
        """Release the folder for other engines."""
        os.close(self._lock)
        os.close(self._folder)

    def _look_around(self) -> None:
        """List the blocks that are there, and make room: the limit may have been larger before."""
        with suppress(FileNotFoundError):
            os.unlink(_PART, dir_fd=self._folder)  # of an engine that was killed
        found: list[tuple[int, str, int]] = []
        for shard in os.listdir(self._folder):
            if len(shard) != 2:
                continue
            for name, status in self._files(shard):
                found.append((status.st_mtime_ns, shard + name, _on_disk(status.st_size)))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self.forget(next(iter(self._sizes)))

    def _files(self, shard: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the blocks of a shard. Other files do not count as blocks, and are replaced by
        one."""
        try:
            descriptor = _open_folder(shard, self._folder)
        except ConfigError as error:
            raise ConfigError(f"kv_offload: {self.path / shard} {error}") from error
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if _is_own_file(status):
                        yield entry.name, status
        finally:
            os.close(descriptor)

    @contextmanager
    def _shard_of(self, name: str) -> Iterator[int]:
        """Open the folder of a block."""
        try:
            descriptor = _open_folder(name[:2], self._folder)
        except ConfigError as error:
            raise OSError(errno.EPERM, str(error), str(self.path / name[:2])) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _own(path: Path) -> tuple[int, int]:
    """Make a folder of our own, and lock it. Returns the descriptors of the folder and of the
    lock."""
    if not _FOLDERS_OPEN:
        raise FolderBusyError(f"kv_offload: {path}: this system has no file locks of POSIX")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        folder = _open_folder(path, None)
    except ConfigError as error:
        raise ConfigError(f"kv_offload: {path} {error}") from error
    try:
        names = os.listdir(folder)
        if names and _LOCK not in names:
            raise ConfigError(f"kv_offload: {path} has other files in it: name a folder of its own")
        os.fchmod(folder, 0o700)
        return folder, _lock_in(folder, path)
    except BaseException:
        os.close(folder)
        raise


def _open_folder(path: str | Path, within: int | None) -> int:
    """Open a folder of our own. ConfigError says what else it is, without its path."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY, dir_fd=within)
    except OSError as error:
        status = os.stat(path, dir_fd=within, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            raise ConfigError(
                "is a symbolic link, which another user may have pointed elsewhere: name the "
                "folder itself"
            ) from error
        raise
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        os.close(descriptor)
        raise ConfigError(
            f"belongs to another user ({status.st_uid}), who could change what is in it: name a "
            "folder of your own"
        )
    return descriptor


def _lock_in(folder: int, path: Path) -> int:
    """Lock the lock file of a folder."""
    descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600, dir_fd=folder)
    try:
        if not _is_own_file(os.fstat(descriptor)):
            raise ConfigError(
                f"kv_offload: {path / _LOCK} is not a file that an engine of this user made: "
                "name another folder"
            )
        lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        busy = isinstance(error, BlockingIOError)
        why = "another engine has it" if busy else f"it cannot be locked ({error})"
        raise FolderBusyError(f"kv_offload: {path}: {why}") from error
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def _is_own_file(status: os.stat_result) -> bool:
    """Return whether it is a regular file of the user who runs the engine, with one name."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _checksum(name: str, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(name.encode()))


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _DISK_UNIT) * _DISK_UNIT
