"""`LinkTransport` lets a link to another machine serve an `asyncio.Protocol`."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue

from octavo.base.errors import LinkError
from octavo.links.link import Frame, Link
from octavo.links.stream import LIMITS, send_all


class LinkTransport(asyncio.Transport):
    """A transport over a link, which it starts. Belongs to the event loop that makes it.

    The link's own thread receives. Another one sends, since a send may have to wait.
    """

    def __init__(self, link: Link, protocol: asyncio.Protocol):
        super().__init__()
        self._link = link
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._to_send: SimpleQueue[bytes | None] = SimpleQueue()
        self._is_lost = False
        protocol.connection_made(self)
        threading.Thread(target=self._send_all, name="octavo-link-out", daemon=True).start()
        link.when_it_ends(self._on_end)
        link.start(LIMITS, self._on_frame)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._to_send.put(bytes(data))

    def is_closing(self) -> bool:
        return self._link.failure is not None

    def abort(self) -> None:
        self._link.end(LinkError(f"{self._link.peer}: the link was closed here"))

    close = abort

    # -- in threads --------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (data := self._to_send.get()) is not None:
            try:
                send_all(self._link, data)
            except LinkError:
                return

    def _on_frame(self, frame: Frame) -> None:
        self._loop.call_soon_threadsafe(self._receive, bytes(frame.data))

    def _on_end(self, why: LinkError) -> None:
        self._to_send.put(None)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._lose, why)

    # -- on the event loop -------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        if self._is_lost:
            return
        try:
            self._protocol.data_received(data)
        except Exception as error:  # what came is no message
            self._link.end(LinkError(f"{self._link.peer}: {error}"))

    def _lose(self, why: LinkError) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._protocol.connection_lost(why)
