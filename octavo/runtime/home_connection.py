"""The connection of a rank on another machine to the home rank, before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from octavo.base.errors import LinkError
from octavo.links.frames import MESSAGE, WORDS
from octavo.links.link import Link

MAX_MESSAGE_BYTES = 1 << 20
# In a message of the home rank: bytes that its messages of steps may have, from then on.
STEP_BYTES = "step_message_bytes"
_MOST_STEP_BYTES = 64 << 20
ERROR = "error"  # in the last message of a rank that cannot go on: why
MESSAGES: Mapping[int, int] = {MESSAGE: MAX_MESSAGE_BYTES}


def error_in(data: memoryview) -> str:
    """Return the error in the last message of a rank, or what is there in its place."""
    try:
        return str(json.loads(bytes(data))[ERROR])
    except (ValueError, RecursionError, KeyError, TypeError):
        return "it says something that is no error"


class HomeConnection:
    """A follower's connection to the home rank, as ``JsonConnection`` is one on one machine."""

    def __init__(self, link: Link):
        self._link = link
        self.reason: str | None = None  # of its end, if that was on this side

    @property
    def has_ended(self) -> bool:
        return self._link.failure is not None

    def when_it_ends(self, callback: Callable[[LinkError], object]) -> None:
        """Have ``callback`` called once, in any thread, when the link ends, or has ended."""
        self._link.when_it_ends(callback)

    def fail(self, reason: str) -> None:
        """Say why this rank cannot go on, and end the link, if it has not ended. May be called from
        any thread."""
        if self._link.failure is None:
            self.reason = reason
            self.send({ERROR: reason})
            self._link.end(LinkError(reason))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; it is dropped if the link has ended, which `receive` tells."""
        try:
            self._link.send_message(message)
        except LinkError:
            return

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None if the link has ended."""
        try:
            message = self._link.receive_message()
        except LinkError:
            return None
        if STEP_BYTES in message:
            most = min(int(message.pop(STEP_BYTES)), _MOST_STEP_BYTES)
            self._link.allow({**MESSAGES, WORDS: most})
        return message
