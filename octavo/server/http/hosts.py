"""The names that this server has in ``Host`` headers, against DNS rebinding.

A web page can make a name of its own lead to any address, and its visitor's browser then sends what
the page likes, as if it came from this server. Only the ``Host`` header shows it: it has the page's
name. An address in it was not looked up by name, so it is safe.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from octavo.server.settings import LOOPBACK, ServerSettings

ANY = "*"

_PORT = re.compile(r":\d*$")


class AllowedHosts:
    """The names that a request may have in its ``Host`` header.

    Args:
        is_open: whether requests need no key. A foreign page has no key, so a server on a network
            with keys may have any name; on loopback it never may.
    """

    def __init__(self, settings: ServerSettings, *, is_open: bool):
        self._accepts_all = ANY in settings.allowed_host
        self._accepts_all |= not is_open and not settings.is_loopback
        own = (*LOOPBACK, settings.host, *settings.allowed_host)
        if not settings.is_loopback:
            name = socket.gethostname()
            own = (*own, name, f"{name}.local")
        self._names = frozenset(name.lower() for name in own)

    def accepts(self, host: str) -> bool:
        """True if ``host``, a header's text in lower case, may mean this server."""
        if self._accepts_all:
            return True
        name = _PORT.sub("", host)
        return name in self._names or _is_address(name)


def _is_address(name: str) -> bool:
    """True if it is the address of a machine; 0.0.0.0 is none, for it evades some browsers'
    rules."""
    is_bracketed = name.startswith("[") and name.endswith("]")
    try:
        address = ipaddress.ip_address(name[1:-1] if is_bracketed else name)
    except ValueError:
        return False
    return not address.is_unspecified and is_bracketed == (address.version == 6)
