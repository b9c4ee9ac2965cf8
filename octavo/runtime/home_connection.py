"""The connection of a rank on another machine to the home rank, before the first step."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
