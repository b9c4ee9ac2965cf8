"""Two ends of a link in one process, and a way to send what no link would."""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager

from octavo.links.certificate import connecting_context
from octavo.links.frames import HELLO, OutgoingFrames
from octavo.links.handshake import PROTOCOL, connect
from octavo.links.link import Patience
from octavo.links.listener import Listener

FACTS = {"octavo": "1.2.3", "kernel ABI": 14}


@contextmanager
def two_ends(patience: Patience | None = None, facts=FACTS):
    """``(link of who listens, link of who connected)``, not started yet."""
    with Listener(patience=patience) as listener:
        invitation = listener.invite("rank 1", facts)
        theirs = connect(invitation.ticket, facts, purpose="rank 0", patience=patience)
        with theirs, invitation.wait(60) as ours:
            yield ours, theirs


class RawPeer:
    """A client that sends bytes of its own over TLS: after a good handshake, or instead of one."""

    def __init__(self, ticket):
        address = (ticket.address.host, ticket.address.port)
        self.plain = socket.create_connection(address, 60)
        self.tls = connecting_context().wrap_socket(self.plain)
        self.frames = OutgoingFrames()

    def frame(self, kind: int, data: bytes = b"") -> bytes:
        return self.frames.header(kind, len(data)) + data

    def hello(self, ticket, facts=FACTS) -> bytes:
        text = json.dumps({**PROTOCOL, **facts}).encode()
        return self.frame(HELLO, ticket.token + text)

    def send(self, data: bytes) -> None:
        self.tls.sendall(data)

    def is_cut(self) -> bool:
        """Wait for the end of the connection, whatever comes before it."""
        try:
            while self.tls.recv(1 << 16):
                pass
        except OSError as error:
            return not isinstance(error, TimeoutError)
        return True

    def close(self) -> None:
        self.tls.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
