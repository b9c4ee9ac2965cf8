"""The KV blocks of a replica that may be on another machine, which come over a link.

Frames from the replica that has the blocks (`block_server.py`), and to it::

    BLOCK_NAMES   names, one after the other: they can be asked for from now on    ->
                  <-   WANTED        names: the reader asks for these blocks
    BLOCK         name, checksum (u32), block. The name alone: it is not there       ->

A block comes only to a reader that has asked for it, and into memory that nothing else uses: what
comes too late overwrites nothing. Names, blocks that are under way, and waiting are bounded.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from octavo.base.errors import LinkError
from octavo.links.frames import BLOCK, BLOCK_NAMES, WANTED
from octavo.links.link import Frame, Link
from octavo.offload.shared_blocks import BlockSource, MissingBlockError, check

NAME_BYTES = 32
MOST_NAMES = 1024  # in a frame
MOST_WANTED = 64  # that are asked for and have not come
_CHECKSUM = struct.Struct("<I")
_HEAD_BYTES = NAME_BYTES + _CHECKSUM.size

# Blocks that are asked for before the first of them has come have so many bytes together, as far as
# they are two or more: what a fast network has under way.
_BYTES_UNDER_WAY = 16 << 20
# How long a block that was asked for is waited for: seconds, and bytes a second of all that are.
_PATIENCE_SECONDS, _LEAST_RATE = 2.0, 10e6


def names_in(data: memoryview, most: int) -> list[bytes]:
    """Return the names of a frame.

    Raises:
        LinkError: it has none, more than ``most``, or a part of one.
    """
    count, rest = divmod(len(data), NAME_BYTES)
    if rest or not 0 < count <= most:
        raise LinkError(f"a frame of {len(data)} bytes, where names of {NAME_BYTES} bytes were due")
    return [bytes(data[at : at + NAME_BYTES]) for at in range(0, len(data), NAME_BYTES)]


class BlockFrame:
    """The bytes of a BLOCK, which are written again for each: first its ``block``."""

    def __init__(self, block_bytes: int):
        self.data = memoryview(bytearray(_HEAD_BYTES + block_bytes))
        self.block = self.data[_HEAD_BYTES:]

    def begin(self, name: bytes, checksum: int) -> None:
        """Write what comes before the block."""
        self.data[:NAME_BYTES] = name
        _CHECKSUM.pack_into(self.data, NAME_BYTES, checksum)


class LinkedBlocks(BlockSource):
    """The blocks of one replica, over one link after the other. One thread reads; all else may be
    called from any thread.

    Args:
        most_names: that are remembered; the oldest are forgotten.
        when_lost: called in a thread of the link, when that has ended by itself.
    """

    def __init__(self, block_bytes: int, most_names: int, when_lost: Callable[[LinkError], object]):
        self._block_bytes = block_bytes
        self._most_names = most_names
        self._when_lost = when_lost
        under_way = _BYTES_UNDER_WAY // block_bytes
        self._most_wanted = max(2, min(MOST_WANTED, under_way))
        self._patience = _PATIENCE_SECONDS + self._most_wanted * block_bytes / _LEAST_RATE
        self._news = threading.Condition()  # guards what follows
        self._link: Link | None = None
        self._names: dict[bytes, None] = {}  # in the order in which they were written
        self._wanted: set[bytes] = set()
        self._arrived: dict[bytes, bytes | None] = {}  # checksum and block; None: it is not there
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        return self._link is not None

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def join(self, link: Link) -> None:
        """Read from this link from now on, which is not started yet; an earlier one ends."""
        with self._news:
            before, self._link = self._link, None if self._is_closed else link
            self._forget()
        if before is not None:
            before.close()
        if self._is_closed:
            link.close()
            return
        limits = {BLOCK_NAMES: MOST_NAMES * NAME_BYTES, BLOCK: _HEAD_BYTES + self._block_bytes}
        link.when_it_ends(partial(self._lose, link))
        link.start(limits, partial(self._take, link))

    def close(self) -> None:
        with self._news:
            self._is_closed = True
            link, self._link = self._link, None
            self._forget()
        if link is not None:
            link.close()

    # -- the thread that reads -------------------------------------------------------------------

    def read(self, name: bytes, content: memoryview, ahead: Iterable[bytes] = ()) -> None:
        """See `BlockSource.read`: of the blocks ``ahead``, as many are asked for as may be under
        way."""
        link = self._ask(name, ahead)
        deadline = time.monotonic() + self._patience
        with self._news:
            while name not in self._arrived:
                if self._link is not link:
                    raise ConnectionError(str(link.failure or "there is another link"))
                left = deadline - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    break
            found, has_come = self._arrived.pop(name, None), name not in self._wanted
            if found is None:
                self._names.pop(name, None)
        if not has_come:
            late = f"{link.peer}: a block has not come in {self._patience:.3g} seconds"
            link.end(LinkError(late))  # no other block is waited for
            raise TimeoutError(late)
        if found is None:
            raise MissingBlockError
        content[:] = memoryview(found)[_CHECKSUM.size :]
        check(name, content, *_CHECKSUM.unpack_from(found))

    def _ask(self, name: bytes, ahead: Iterable[bytes]) -> Link:
        """Ask for blocks that were not asked for yet; returns the link. ConnectionError if there is
        none."""
        names = [name, *islice(ahead, self._most_wanted - 1)]
        with self._news:
            link = self._link
            if link is None:
                raise ConnectionError("there is no link to the other replica")
            for each in self._arrived.keys() - set(names):
                del self._arrived[each]  # it was not read after all
            new = [each for each in dict.fromkeys(names) if self._is_new(each)]
            room = self._most_wanted - len(self._wanted) - len(self._arrived)
            del new[max(room, 1 if name in new else 0) :]
            self._wanted.update(new)
        if new:
            try:
                link.send(WANTED, b"".join(new))
            except LinkError as error:
                raise ConnectionError(str(error)) from None
        return link

    def _is_new(self, name: bytes) -> bool:
        return name in self._names and name not in self._wanted and name not in self._arrived

    # -- the thread of the link ------------------------------------------------------------------

    def _take(self, link: Link, frame: Frame) -> None:
        with self._news:
            if self._link is not link:
                return
            if frame.kind == BLOCK_NAMES:
                self._note(names_in(frame.data, MOST_NAMES))
            else:
                self._arrive(frame.data)
            self._news.notify_all()

    def _note(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._names.pop(name, None)
            self._names[name] = None
        while len(self._names) > self._most_names:
            del self._names[next(iter(self._names))]

    def _arrive(self, data: memoryview) -> None:
        name, size = bytes(data[:NAME_BYTES]), len(data)
        if name not in self._wanted:
            raise LinkError("a block came that was not asked for")
        if size not in (NAME_BYTES, _HEAD_BYTES + self._block_bytes):
            raise LinkError(f"a block of {size:,} bytes came where {self._block_bytes:,} were due")
        self._wanted.discard(name)
        self._arrived[name] = bytes(data[NAME_BYTES:]) or None

    def _lose(self, link: Link, why: LinkError) -> None:
        with self._news:
            if self._link is not link:
                return
            self._link = None
            self._forget()
        self._when_lost(why)

    def _forget(self) -> None:
        self._names.clear()
        self._wanted.clear()
        self._arrived.clear()
        self._news.notify_all()
