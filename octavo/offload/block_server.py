"""Gives the KV blocks that a replica writes to replicas that may be on other machines.

`linked_blocks.py` has the frames, and the other end of the links.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

from octavo.base.errors import LinkError, OctavoError
from octavo.links.facts import Facts
from octavo.links.frames import BLOCK, BLOCK_NAMES, WANTED
from octavo.links.link import Frame, Link
from octavo.links.listener import Invitation, Listener
from octavo.links.ticket import Address
from octavo.offload.linked_blocks import (
    MOST_NAMES,
    MOST_WANTED,
    NAME_BYTES,
    BlockFrame,
    names_in,
)
from octavo.offload.shared_blocks import (
    MissingBlockError,
    SharedBlocks,
    SharedBlocksReader,
    create_region,
    read_only,
)

_log = logging.getLogger("octavo")

_CONNECT_SECONDS = 30.0  # for a reader that was invited
_LOOK_SECONDS = 1.0  # between two looks for the end of a link, of which no word came


class ServedBlocks(SharedBlocks):
    """Blocks in memory of this process, which readers get over links.

    Args:
        host: the address of this machine on which readers are listened for.
        num_bytes: of the memory, which is taken as blocks are written.
        facts: that readers must have in common with this replica.

    Raises:
        ConfigError: the address cannot be listened on. ValueError: there is no room for a block.
        OSError: the system gives no such memory.
    """

    def __init__(self, host: str, num_bytes: int, block_bytes: int, identity: bytes, facts: Facts):
        descriptor = create_region(num_bytes)
        try:
            super().__init__(descriptor, block_bytes, identity)
            copy = read_only(descriptor)
            try:
                self._blocks = SharedBlocksReader(copy, block_bytes, identity)
            finally:
                os.close(copy)
        finally:
            os.close(descriptor)  # the mappings stay
        self._block_bytes, self._facts = block_bytes, facts
        self._listener = Listener(Address(host))
        self._news = threading.Condition()  # guards what follows
        self._readers: dict[_Reader, threading.Thread] = {}
        self._is_closed = False

    def invite(self, name: str) -> str:
        """Return the ticket by which one reader may connect, once: a secret."""
        invitation = self._listener.invite(name, self._facts)
        threading.Thread(
            target=self._serve, args=(invitation,), name="octavo-kv-reader", daemon=True
        ).start()
        return invitation.ticket.secret_text()

    def write(self, name: bytes, content: memoryview) -> None:
        super().write(name, content)
        with self._news:
            self._news.notify_all()

    def close(self) -> None:
        """End all links, and give the memory back."""
        self._listener.close()
        with self._news:
            self._is_closed = True
            readers = dict(self._readers)
            self._news.notify_all()
        for reader, thread in readers.items():
            reader.link.close()
            thread.join()
        self._blocks.close()
        super().close()

    def _serve(self, invitation: Invitation) -> None:
        """Give one reader what it asks for, until its link ends."""
        try:
            link = invitation.wait(_CONNECT_SECONDS)
        except OctavoError as error:
            if not self._is_closed:
                _log.warning("KV is not passed on: %s", error)
            return
        reader = _Reader(link, self._blocks, self._block_bytes, self._news)
        with self._news:
            if not self._is_closed:
                self._readers[reader] = threading.current_thread()
        try:
            while not self._is_closed and reader.give():
                pass
        finally:
            link.close()
            with self._news:
                self._readers.pop(reader, None)


class _Reader:
    """A replica that reads blocks over a link."""

    def __init__(
        self, link: Link, blocks: SharedBlocksReader, block_bytes: int, news: threading.Condition
    ):
        self.link = link
        self._blocks, self._news = blocks, news
        self._frame = BlockFrame(block_bytes)
        self._next = 0  # the number of the block whose name is said next
        self._wanted: deque[bytes] = deque()
        link.when_it_ends(self._on_end)
        link.start({WANTED: MOST_WANTED * NAME_BYTES}, self._on_frame)

    def give(self) -> bool:
        """Wait for something to send, and send it. Returns False once the link has ended."""
        with self._news:
            self._news.wait_for(self._has_news, _LOOK_SECONDS)
            wanted, self._wanted = self._wanted, deque()
        if self.link.failure is not None:
            return False
        try:
            self._say_names()
            for name in wanted:
                self._send(name)
        except LinkError as error:
            _log.warning("KV is not passed on any more: %s", error)
            return False
        return True

    def _has_news(self) -> bool:
        return bool(
            self._wanted or self.link.failure is not None or self._next != self._blocks.count
        )

    def _say_names(self) -> None:
        names, self._next = self._blocks.names_since(self._next)
        for begin in range(0, len(names), MOST_NAMES):
            self.link.send(BLOCK_NAMES, b"".join(names[begin : begin + MOST_NAMES]))

    def _send(self, name: bytes) -> None:
        try:
            self._frame.begin(name, self._blocks.copy(name, self._frame.block))
        except MissingBlockError:
            self.link.send(BLOCK, name)
        else:
            self.link.send(BLOCK, self._frame.data)

    # -- in threads of the link ------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        names = names_in(frame.data, MOST_WANTED)
        with self._news:
            if len(self._wanted) + len(names) > MOST_WANTED:
                raise LinkError("more blocks were asked for at once than may be")
            self._wanted += names
            self._news.notify_all()

    def _on_end(self, why: LinkError) -> None:
        with self._news:
            self._news.notify_all()
