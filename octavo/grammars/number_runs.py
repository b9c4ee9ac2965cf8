"""`NumberRuns`, which finds runs of digits in JSON that are too long to mean anything.

A schema does not bound the digits of a number, and there are models that repeat them for ever.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from octavo.core.token_mask import Bits

# Doubles have 17 significant digits, and 64-bit integers 20.
MAX_DIGITS = 32

_DIGITS = frozenset(b"0123456789")
_OF_SCALARS = frozenset(b"+-.abcdefghijklmnopqrstuvwxyzE \t\r\n")
_QUOTE, _BACKSLASH = b'"\\'
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")


class DigitBits:
    """The bits of all tokens of a vocabulary but those that begin with a digit.

    Args:
        text_of: the bytes of a token.
    """

    def __init__(self, text_of: Callable[[int], bytes], vocab_size: int):
        self.text_of = text_of
        self._vocab_size = vocab_size
        self._others: Bits | None = None

    @property
    def others(self) -> Bits:
        return self._others or self.make()

    def make(self) -> Bits:
        """Return the bits, which takes some 30 ms the first time."""
        if self._others is None:
            bits = array("I", b"\xff" * (4 * -(-self._vocab_size // 32)))
            for token_id in range(self._vocab_size):
                text = self.text_of(token_id)
                if text and text[0] in _DIGITS:
                    bits[token_id >> 5] &= ~(1 << (token_id & 31))
            self._others = bits
        return self._others


class _Place(NamedTuple):
    """A place in a text: within JSON, or where one of the openings is looked for."""

    is_json: bool
    depth: int = 0  # of lists and objects
    is_string: bool = False
    is_escaped: bool = False
    num_digits: int = 0  # of the run that ends here
    tail: bytes = b""  # of a text that is no JSON


class NumberRuns:
    """Follows the tokens of one answer, and knows how many digits it ends with.

    Args:
        openings: texts after which a JSON value comes; without any, all is one.
    """

    def __init__(self, digits: DigitBits, openings: Sequence[bytes] = ()):
        self._digits = digits
        self._openings = tuple(openings)
        self._longest = max(map(len, openings), default=0)
        self._places = [_Place(not openings)]  # one after each token

    def bits(self) -> Bits | None:
        """Return the tokens that end a run that is too long; None while there is none."""
        return self._digits.others if self._places[-1].num_digits >= MAX_DIGITS else None

    def advance(self, token_ids: Iterable[int]) -> None:
        """Follow further tokens."""
        for token_id in token_ids:
            place, text = self._places[-1], self._digits.text_of(token_id)
            if place.is_string and not place.is_escaped and text.isalnum():  # the most common
                self._places.append(place)
                continue
            for byte in text:
                place = self._after(place, byte)
            self._places.append(place)

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        del self._places[len(self._places) - num_tokens :]

    def fork(self) -> NumberRuns:
        """Return a copy in the same state."""
        other = NumberRuns(self._digits, self._openings)
        other._places = self._places.copy()
        return other

    def _after(self, place: _Place, byte: int) -> _Place:
        if not place.is_json:
            tail = (place.tail + bytes([byte]))[-self._longest :]
            return _Place(True) if tail.endswith(self._openings) else _Place(False, tail=tail)
        depth = place.depth
        if place.is_string:
            if place.is_escaped:
                return _Place(True, depth, is_string=True)
            if byte == _QUOTE:
                return self._end_of_value(depth)
            return _Place(True, depth, is_string=True, is_escaped=byte == _BACKSLASH)
        if byte in _DIGITS:
            return _Place(True, depth, num_digits=place.num_digits + 1)
        if byte == _QUOTE:
            return _Place(True, depth, is_string=True)
        if byte in _OPENING:
            return _Place(True, depth + 1)
        if byte in _CLOSING:
            return self._end_of_value(depth - 1)
        if depth or byte in _OF_SCALARS or not self._openings:
            return _Place(True, depth)
        return self._after(_Place(False), byte)

    def _end_of_value(self, depth: int) -> _Place:
        return _Place(depth > 0 or not self._openings, max(depth, 0))
