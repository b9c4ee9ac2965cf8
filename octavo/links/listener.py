"""The end of links that listens: it invites processes, and lets in those that it has invited.

    listener = Listener(Address("10.0.0.5"))
    invitation = listener.invite("rank 1", facts)
    ...                                             hand over invitation.ticket, in secret
    link = invitation.wait(60)                      that process has connected
    listener.close()

A connection that shows no token, a wrong one, one that was used, or damaged frames, is ended alone,
with a line in the log; so is one that takes too long. Others do not wait for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field

from octavo.base.errors import ConfigError, LinkError
from octavo.links.certificate import Certificate, make_certificate
from octavo.links.connection import TlsConnection
from octavo.links.facts import Facts, difference
from octavo.links.frames import HELLO, MESSAGE
from octavo.links.handshake import PROTOCOL, Greeting, facts_in, split_hello
from octavo.links.link import Link, Patience
from octavo.links.ticket import TOKEN_BYTES, Address, Ticket

_log = logging.getLogger("octavo")

LOOPBACK = Address("127.0.0.1")
_ALL_ADDRESSES = ("0.0.0.0", "::")
# Connections that have not shown a token yet. One more takes the place of the oldest.
_MOST_UNKNOWN = 32


@dataclass(eq=False)
class Invitation:
    """An invitation of one process, and the link to it once it has come.

    Args:
        name: of the process, for errors.
        facts: that it must have in common with this one.
    """

    name: str
    ticket: Ticket
    facts: Facts
    _link: Future[Link] = field(default_factory=Future)

    def wait(self, seconds: float) -> Link:
        """Wait for the process, and return the link to it.

        Raises:
            ConfigError: it came, and has other facts; names them. Or it did not come.
            LinkError: the listener was closed.
        """
        try:
            return self._link.result(seconds)
        except FutureTimeoutError:
            self._link.cancel()
            raise ConfigError(
                f"{self.name} did not connect to {self.ticket.address} in {seconds:g} seconds: was "
                "it started, and can it reach this address?"
            ) from None

    def give_up(self, why: Exception) -> None:
        """Have `wait` raise an error, unless the process has come."""
        if not self._link.done():
            self.answer(why)

    def answer(self, result: Link | Exception) -> None:
        """Give the result to who waits; a link that is not waited for any more is closed."""
        try:
            if isinstance(result, Exception):
                self._link.set_exception(result)
            else:
                self._link.set_result(result)
        except InvalidStateError:
            if isinstance(result, Link):
                result.close()


class Listener:
    """A socket with a certificate of its own, and the thread that accepts connections.

    Args:
        address: to bind. Nothing but loopback is listened on unless it is said here.
        advertised: the host that others reach it at, if that is not the one of ``address``.

    Raises:
        ConfigError: the address cannot be bound, or others cannot know it, or the package for
            certificates is missing.
    """

    def __init__(
        self,
        address: Address = LOOPBACK,
        *,
        advertised: str | None = None,
        patience: Patience | None = None,
    ):
        if advertised is None and address.host in _ALL_ADDRESSES:
            raise ConfigError(
                f"{address} is all addresses of this machine, and others need one to connect to: "
                "give that"
            )
        self._certificate = make_certificate()
        self._socket = _bind(address)
        port = self._socket.getsockname()[1]
        self.address = Address(advertised or address.host, port)
        self._guests = _Guests(self._certificate, patience or Patience())
        thread = threading.Thread(
            target=_accept, args=(self._socket, self._guests), name="octavo-listener", daemon=True
        )
        thread.start()
        self._close = weakref.finalize(self, _close, self._socket, self._guests, thread)

    def invite(self, name: str, facts: Facts) -> Invitation:
        """Make a ticket for one process, which it may use once."""
        token = secrets.token_bytes(TOKEN_BYTES)
        ticket = Ticket(self.address, self._certificate.fingerprint, token)
        invitation = Invitation(name, ticket, {**PROTOCOL, **facts})
        self._guests.add(invitation)
        return invitation

    def close(self) -> None:
        """Take no more connections. Links that were made go on. May be repeated."""
        self._close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Guests:
    """Invitations, and connections that have not yet shown one."""

    def __init__(self, certificate: Certificate, patience: Patience):
        self._certificate, self._patience = certificate, patience
        self._lock = threading.Lock()
        self._invited: dict[bytes, Invitation] = {}  # by digests of their tokens
        self._used: set[bytes] = set()
        self._unknown: deque[socket.socket] = deque()

    def add(self, invitation: Invitation) -> None:
        with self._lock:
            self._invited[_digest(invitation.ticket.token)] = invitation

    def receive(self, plain: socket.socket, peer: str) -> None:
        """Greet a connection in a thread of its own."""
        with self._lock:
            if len(self._unknown) == _MOST_UNKNOWN:
                oldest = self._unknown.popleft()
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            # A descriptor of its own, which is valid until it is closed here.
            copy = plain.dup()
            self._unknown.append(copy)
        threading.Thread(
            target=self._greet, args=(plain, copy, peer), name="octavo-handshake", daemon=True
        ).start()

    def close(self) -> None:
        with self._lock:
            for each in self._unknown:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            waiting, self._invited = list(self._invited.values()), {}
        for invitation in waiting:
            invitation.answer(LinkError(f"{invitation.name}: the listener was closed"))

    def _greet(self, plain: socket.socket, copy: socket.socket, peer: str) -> None:
        try:
            self._let_in(plain, peer)
        except (LinkError, ConfigError) as error:
            _log.warning("a connection was ended: %s", error)
        except TimeoutError:
            _log.warning(
                "a connection was ended: %s has not shown a token in %g s",
                *(peer, self._patience.handshake_s),
            )
        finally:
            with self._lock:
                with suppress(ValueError):
                    self._unknown.remove(copy)
                copy.close()

    def _let_in(self, plain: socket.socket, peer: str) -> None:
        patience = self._patience
        deadline = time.monotonic() + patience.handshake_s
        connection = TlsConnection(
            *(plain, self._certificate.context),
            is_server=True,
            peer=peer,
            patience_s=patience.silence_s,
            deadline=deadline,
        )
        try:
            greeting = Greeting(connection, deadline)
            token, text = split_hello(greeting.take(HELLO))
            invitation = self._invitation_of(token, peer)
            connection.peer = f"{invitation.name} at {peer}"
            try:
                self._compare(greeting, invitation, text)
            except Exception as error:
                invitation.answer(error)
                raise
        except BaseException:
            connection.close()
            raise
        invitation.answer(greeting.link(patience))

    def _invitation_of(self, token: bytes, peer: str) -> Invitation:
        """Return the invitation of a token, which it is no more then. LinkError if it is none."""
        # Of digests: how long it takes to find one says nothing about a token.
        digest = _digest(token)
        with self._lock:
            invitation = self._invited.pop(digest, None)
            was_used = digest in self._used
            if invitation is not None:
                self._used.add(digest)
        if invitation is not None and hmac.compare_digest(invitation.ticket.token, token):
            return invitation
        raise LinkError(f"{peer}: its token {'was used before' if was_used else 'is not known'}")

    def _compare(self, greeting: Greeting, invitation: Invitation, text: bytes) -> None:
        peer = greeting.connection.peer
        theirs = facts_in(text)
        greeting.send(MESSAGE, json.dumps({"facts": dict(invitation.facts)}).encode())
        if theirs is None:
            raise LinkError(f"{peer}: it does not say what it is")
        if (why := difference(invitation.facts, theirs)) is not None:
            raise ConfigError(f"{peer}: {why}")


def _bind(address: Address) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(_MOST_UNKNOWN)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{address} cannot be listened on: {error.strerror or error}; give an address of this "
            "machine, and a port that is free, or none"
        ) from error
    return listening


def _accept(listening: socket.socket, guests: _Guests) -> None:
    while True:
        try:
            plain, place = listening.accept()
        except OSError:
            if listening.fileno() < 0 or not _is_listening(listening):
                return
            time.sleep(0.01)  # there are no more descriptors, or the connection is gone again
            continue
        guests.receive(plain, str(Address(place[0], place[1])))


def _is_listening(listening: socket.socket) -> bool:
    with suppress(OSError):
        return bool(listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _close(listening: socket.socket, guests: _Guests, thread: threading.Thread) -> None:
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)  # which ends the wait of its thread
    guests.close()
    if threading.current_thread() is not thread:
        thread.join()
    listening.close()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
