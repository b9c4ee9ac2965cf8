"""Bounded memory of generated output that clients have not read yet.

Answers that are sent whole wait here until their last token, and streams as long as their client is
slower than the engine. The bound of one answer is its ``max_tokens``, with log-probabilities at
kilobytes each; many of them together would have none. So where all take more than there is, the one
that takes the most is given up, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.core.batch import TokenLogprobs

_log = logging.getLogger("octavo.server")

DEFAULT_MAX_BYTES = 1 << 30
_LEAST_BYTES = 1000

# In CPython, roughly: a token's id; a character; an entry of log-probabilities, and each of its
# likeliest tokens.
_BYTES_OF_TOKEN, _BYTES_OF_CHAR, _BYTES_OF_ENTRY, _BYTES_OF_TOP = 40, 2, 160, 128


class Holder(Protocol):
    """An object that holds a part of an answer."""

    def give_up(self) -> None:
        """Drop what it holds and take nothing more; releases the memory."""
        ...


class UnreadOutputMemory:
    """A count of the bytes that each holder has, with a bound on their sum.

    Args:
        max_bytes: that all of them may have together.

    Raises:
        ConfigError: no answer would fit in so few.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES):
        if max_bytes < _LEAST_BYTES:
            raise ConfigError(
                f"max_unread_bytes must be at least {_LEAST_BYTES}, not {max_bytes}: no answer "
                "would fit"
            )
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._of_holders: dict[Holder, int] = {}

    def hold(self, holder: Holder, num_bytes: int) -> None:
        """Count so many bytes more of a holder."""
        self.num_bytes += num_bytes
        self._of_holders[holder] = self._of_holders.get(holder, 0) + num_bytes

    def release(self, holder: Holder) -> None:
        """Count nothing of a holder any more."""
        self.num_bytes -= self._of_holders.pop(holder, 0)

    def keep_within(self) -> None:
        """Give up the largest holders, as long as all together hold too much."""
        while self.num_bytes > self.max_bytes:
            holder, num_bytes = max(self._of_holders.items(), key=lambda item: item[1])
            _log.warning(
                "%d bytes of answers are not read yet, more than --max-unread-bytes: the largest, "
                "%d bytes, is given up",
                self.num_bytes,
                num_bytes,
            )
            holder.give_up()


def bytes_of(num_tokens: int, num_chars: int, logprobs: Iterable[TokenLogprobs] = ()) -> int:
    """Return about how many bytes a part of an answer takes in memory."""
    num_bytes = _BYTES_OF_TOKEN * num_tokens + _BYTES_OF_CHAR * num_chars
    for entry in logprobs:
        num_bytes += _BYTES_OF_ENTRY + _BYTES_OF_TOP * len(entry.top)
    return num_bytes
