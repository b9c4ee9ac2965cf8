"""Create the socket on which the server listens."""

from __future__ import annotations

import errno
import socket

from octavo.base.errors import ConfigError
from octavo.server.settings import ServerSettings

BACKLOG = 1024

# A client that does not read is noticed when this buffer is full, and uvicorn's own.
# The kernel doubles it.
SEND_BUFFER_BYTES = 64 << 10


def listen(settings: ServerSettings) -> socket.socket:
    """Return the server's socket, listening.

    Raises:
        ConfigError: the address or the port cannot be used.
    """
    where = f"{settings.host} port {settings.port}"
    try:
        found = socket.getaddrinfo(
            settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM
        )
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"host {settings.host} is no address of this machine") from None
    found.sort(key=lambda one: one[0] != socket.AF_INET)  # "localhost" is both
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these. A token is a small write that must not wait for the next.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {where}: {_advice(error)}") from None
    listener.setblocking(False)
    return listener


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "another program does; stop it, or choose another --port (0 takes a free one)"
        case errno.EACCES:
            return "this port is for the system; choose a --port above 1023"
        case errno.EADDRNOTAVAIL:
            return "the host is no address of this machine; try --host 127.0.0.1 or 0.0.0.0"
    return error.strerror or "it was refused"
