"""Tickets: what a process needs to connect to another one, once.

A ticket is a secret. It is handed over by standard input or by the environment, never on a command
line, which all users of a machine can read.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field

from octavo.base.errors import ConfigError

TICKET_VARIABLE = "OCTAVO_LINK_TICKET"
TOKEN_BYTES = FINGERPRINT_BYTES = 32
_MAX_CHARS = 1000
_FORM = re.compile(
    r"(?P<address>[^/\s]{1,300})/(?P<fingerprint>[0-9a-f]{64})/(?P<token>[0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True)
class Address:
    """A host, by name or number, and a port; 0 is one that the system chooses."""

    host: str
    port: int = 0

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``. ConfigError if it is none of them."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\s\[\]/]+))(?::(\d{1,5}))?", text)
    if found is None or int(found[3] or 0) > 65535:
        raise ConfigError(f"{text!r:.80} is no address: HOST, HOST:PORT or [IPV6]:PORT is needed")
    return Address(found[1] or found[2], int(found[3] or 0))


@dataclass(frozen=True, slots=True)
class Ticket:
    """An address, the certificate to expect there, and the token that lets one in once.

    Args:
        fingerprint: SHA-256 of the certificate.
    """

    address: Address
    fingerprint: bytes
    token: bytes = field(repr=False)

    def secret_text(self) -> str:
        """Return the ticket in one line without its end: ``HOST:PORT/FINGERPRINT/TOKEN``."""
        return f"{self.address}/{self.fingerprint.hex()}/{self.token.hex()}"


def parse_ticket(text: str) -> Ticket:
    """Parse what `Ticket.secret_text` has written. ConfigError, without the text, if it is not
    that."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError("a ticket is one line of HOST:PORT/FINGERPRINT/TOKEN, and this is none")
    return Ticket(
        parse_address(found["address"]),
        bytes.fromhex(found["fingerprint"]),
        bytes.fromhex(found["token"]),
    )


def receive_ticket() -> Ticket:
    """Take the ticket from the environment, ``OCTAVO_LINK_TICKET``, and remove it there; else from
    a line of standard input. ConfigError if there is none."""
    return parse_ticket(os.environ.pop(TICKET_VARIABLE, "") or sys.stdin.readline(_MAX_CHARS))
