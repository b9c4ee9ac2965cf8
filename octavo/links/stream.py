"""A link as a stream of bytes in each direction, as a socket has them."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.base.errors import LinkError
from octavo.links.frames import MESSAGE
from octavo.links.link import Link

PIECE_BYTES = 1 << 20
LIMITS: Mapping[int, int] = {MESSAGE: PIECE_BYTES}
"""The frames of a stream: `Link.start` takes them."""


def send_all(link: Link, data: bytes) -> None:
    """Send bytes, in frames of bounded size. LinkError if the link has ended."""
    for begin in range(0, len(data), PIECE_BYTES):
        link.send(MESSAGE, data[begin : begin + PIECE_BYTES])


class LinkStream:
    """A link with the methods of a socket. It starts the link."""

    def __init__(self, link: Link):
        self._link = link
        link.start(LIMITS)

    def recv(self, num_bytes: int, /) -> bytes:
        """Wait for bytes, as many as a frame has; none once the link has ended."""
        try:
            return bytes(self._link.receive().data)
        except LinkError:
            return b""

    def sendall(self, data: bytes, /) -> None:
        """Send bytes. ConnectionError if the link has ended."""
        try:
            send_all(self._link, data)
        except LinkError as error:
            raise ConnectionError(str(error)) from None
