"""The first frames of a connection between machines, by which each end knows the other.

    who connects                          who listens
    TLS: the certificate must have the fingerprint of the ticket
    HELLO    token, facts         ->
                                  <-      MESSAGE  facts, or why it is refused
    both compare the facts, such as versions, and go on only if all are the same

The token comes first, and until it is known nothing else of the frame is read.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ConfigError, LinkError
from octavo.links.certificate import check_fingerprint, connecting_context
from octavo.links.connection import TlsConnection
from octavo.links.facts import Facts, checked_facts, difference
from octavo.links.frames import HEADER_BYTES, HELLO, MESSAGE, IncomingFrames, OutgoingFrames
from octavo.links.link import Link, Patience
from octavo.links.ticket import TOKEN_BYTES, Ticket

MAX_HELLO_BYTES = 1 << 13
# Of the frames and of this handshake; whatever else must agree is among the facts of the caller.
PROTOCOL: Facts = {"link protocol": 1}


def connect(
    ticket: Ticket, facts: Facts, *, purpose: str = "", patience: Patience | None = None
) -> Link:
    """Connect to the process that has made a ticket.

    Args:
        facts: that must be the same there, such as versions.
        purpose: of the other end, for errors: ``rank 0``.

    Raises:
        ConfigError: the other end has other facts; names them.
        LinkError: it cannot be reached, or is another process, or does not take the ticket.
    """
    patience = patience or Patience()
    deadline = time.monotonic() + patience.handshake_s
    address = ticket.address
    peer = f"{purpose} at {address}" if purpose else str(address)
    try:
        plain = socket.create_connection((address.host, address.port), patience.handshake_s)
    except OSError as error:
        raise LinkError(f"{peer} cannot be reached: {error.strerror or error}") from error
    try:
        connection = TlsConnection(
            *(plain, connecting_context()),
            is_server=False,
            peer=peer,
            patience_s=patience.silence_s,
            deadline=deadline,
        )
        try:
            check_fingerprint(connection.tls, ticket.fingerprint, peer)
            greeting = Greeting(connection, deadline)
            ours = {**PROTOCOL, **facts}
            greeting.send(HELLO, ticket.token + json.dumps(ours).encode())
            _check_answer(greeting, ours, peer)
        except BaseException:
            connection.close()
            raise
    except TimeoutError as error:
        raise LinkError(f"{peer}: there was no handshake in {patience.handshake_s:g} s") from error
    return greeting.link(patience)


def _check_answer(greeting: Greeting, ours: Facts, peer: str) -> None:
    try:
        answer = _object(greeting.take(MESSAGE)) or {}
    except LinkError as error:
        raise LinkError(f"{error}; it does not take this ticket") from None
    theirs = checked_facts(answer.get("facts"))
    if theirs is None:
        raise LinkError(f"{peer}: it does not say what it is")
    if (why := difference(ours, theirs)) is not None:
        raise ConfigError(f"{peer}: {why}")


class Greeting:
    """The frames of a handshake, and the link that comes of it."""

    def __init__(self, connection: TlsConnection, deadline: float):
        self.connection = connection
        self._deadline = deadline
        self._incoming = IncomingFrames({HELLO: MAX_HELLO_BYTES, MESSAGE: MAX_HELLO_BYTES})
        self._outgoing = OutgoingFrames()

    def send(self, kind: int, data: bytes) -> None:
        frame = self._outgoing.header(kind, len(data)) + data
        self.connection.send(memoryview(frame), self._deadline)

    def take(self, kind: int) -> bytes:
        """Wait for a frame, and return its bytes. LinkError if it is of another kind."""
        header = self._incoming.header(self._bytes(HEADER_BYTES))
        if header.kind != kind:
            raise LinkError(f"{self.connection.peer}: another frame came than was due")
        return bytes(self._bytes(header.num_bytes))

    def link(self, patience: Patience) -> Link:
        return Link(self.connection, self._incoming, self._outgoing, patience)

    def _bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            at += self.connection.receive(view[at:], self._deadline)
        return data


def split_hello(data: bytes) -> tuple[bytes, bytes]:
    """Return the token and the text of the facts of a HELLO."""
    return data[:TOKEN_BYTES], data[TOKEN_BYTES:]


def facts_in(text: bytes) -> Facts | None:
    """Return the facts of a HELLO whose token is known; None if they cannot be read."""
    return checked_facts(_object(text))


def _object(text: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
