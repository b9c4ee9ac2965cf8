"""A TLS connection whose bytes several threads may send and receive.

OpenSSL's connections are not for two threads at once, and a thread that waits in one would keep the
other out. So the socket never blocks: reads and writes take turns at a lock, and threads wait for
the socket outside of it.
"""

from __future__ import annotations

import select
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from octavo.base.errors import LinkError


class TlsConnection:
    """One end of a TLS connection, after the TCP connection was made.

    Args:
        peer: the other end, for errors.
        patience_s: for which the system waits until sent bytes are acknowledged.

    Raises:
        LinkError: the handshake has failed. TimeoutError: it has taken until ``deadline``.
    """

    def __init__(
        self,
        plain: socket.socket,
        context: ssl.SSLContext,
        *,
        is_server: bool,
        peer: str,
        patience_s: float,
        deadline: float,
    ):
        self.peer = peer
        self._lock = threading.Lock()
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            milliseconds = max(1, int(patience_s * 1000))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        try:
            self.tls = context.wrap_socket(
                plain, server_side=is_server, do_handshake_on_connect=False
            )
        except OSError as error:  # the other end has gone
            plain.close()
            raise LinkError(f"{peer}: {_reason(error)}") from error
        try:
            self._retried(self.tls.do_handshake, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def local_host(self) -> str:
        return str(self.tls.getsockname()[0])

    def receive(self, buffer: memoryview, deadline: float) -> int:
        """Receive some bytes into a buffer; returns how many.

        Raises:
            TimeoutError: nothing came until ``deadline``. LinkError: the connection has ended.
        """
        if not (count := int(self._retried(self.tls.recv_into, deadline, buffer))):
            raise LinkError(f"{self.peer}: the connection was cut")
        return count

    def send(self, data: memoryview, deadline: float) -> None:
        """Send all bytes; from one thread at a time.

        Raises:
            TimeoutError: not all could be sent until ``deadline``. LinkError: the connection has
                ended.
        """
        while data:
            data = data[self._retried(self.tls.send, deadline, data) :]

    def can_send(self) -> bool:
        """Whether the system takes a few bytes at once."""
        return self._poll(select.POLLOUT, 0.0)

    def shut_down(self) -> None:
        """End what either end waits for. May be called from any thread, and repeated."""
        with suppress(OSError):
            # Of the socket below: the method of the TLS socket would take it from its other users.
            socket.socket.shutdown(self.tls, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back, once no other thread uses it."""
        self.shut_down()
        self.tls.close()

    def _retried(self, operation: Any, deadline: float, *arguments: Any) -> Any:
        """Call an operation until it need not wait."""
        while True:
            try:
                with self._lock:
                    return operation(*arguments)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                raise LinkError(f"{self.peer}: {_reason(error)}") from error
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll(event, left):
                raise TimeoutError(f"{self.peer}: it took too long")

    def _poll(self, event: int, seconds: float) -> bool:
        if (fd := self.tls.fileno()) < 0:
            raise LinkError(f"{self.peer}: the connection is closed")
        poll = select.poll()
        poll.register(fd, event)
        return bool(poll.poll(max(0.0, seconds) * 1000))


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError):
        return "the connection was cut"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS: {error.reason.lower().replace('_', ' ')}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
