"""Thoughts among the tokens of an answer: `ThoughtCount` counts them, `ThoughtBudget` ends them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.thought_texts import ThoughtTexts
from octavo.core.token_mask import Bits, MaskPart


@dataclass(frozen=True)
class ThoughtTokens:
    """The tags of a model's thoughts, and how its tokens are read.

    Args:
        begin, ends, begins_inside: see `ThoughtTexts`.
        bytes_of: the bytes that a token adds to the text.
    """

    begin: bytes
    ends: tuple[bytes, ...]
    bytes_of: Callable[[int], bytes]
    begins_inside: bool = False

    @classmethod
    def of(cls, texts: ThoughtTexts, bytes_of: Callable[[int], bytes]) -> ThoughtTokens:
        """Return the tags of an answer."""
        ends = tuple(map(str.encode, texts.ends))
        return cls(texts.begin.encode(), ends, bytes_of, texts.begins_inside)


class _Place(NamedTuple):
    """State of an answer after some of its tokens.

    Args:
        tail: the last bytes since the thought, or what is no thought, began: as many as a tag may
            have begun in.
        num_inside: tokens that came within thoughts, their ends included.
        num_forced: tokens of the closing text that have come, one behind the other.
    """

    is_inside: bool
    tail: bytes = b""
    num_inside: int = 0
    num_forced: int = 0

    def after(self, token_id: int, thoughts: ThoughtTokens) -> _Place:
        tail = self.tail + thoughts.bytes_of(token_id)
        if self.is_inside:
            num_inside = self.num_inside + 1
            found = [(at, end) for end in thoughts.ends if (at := tail.find(end)) >= 0]
            if not found:
                longest = max(map(len, thoughts.ends))
                return _Place(True, tail[-longest:], num_inside)
            at, end = min(found)
            return _Place(False, tail[at + len(end) :], num_inside)
        begin = thoughts.begin
        if (at := tail.find(begin)) >= 0:
            return _Place(True, tail[at + len(begin) :], self.num_inside)
        return _Place(False, tail[-len(begin) :], self.num_inside)


class ThoughtCount:
    """Counts the tokens of one answer that are thoughts, with the tags that end them."""

    def __init__(self, thoughts: ThoughtTokens):
        self._thoughts = thoughts
        self._place = _Place(thoughts.begins_inside)

    @property
    def num_tokens(self) -> int:
        return self._place.num_inside

    def add(self, token_ids: Iterable[int]) -> list[bool]:
        """Follow further tokens. Returns for each whether it belongs to a thought, or completes one
        of its tags."""
        are_thoughts = []
        for token_id in token_ids:
            before, self._place = self._place, self._place.after(token_id, self._thoughts)
            are_thoughts.append(before.is_inside or self._place.is_inside)
        return are_thoughts


class ThoughtBudget:
    """A `TokenMask` that ends the thoughts of an answer after so many tokens of all of them: none
    is allowed then but those of the text that closes one. What is no thought is free, and a thought
    that begins later is closed at once.

    Args:
        closing: the tokens of that text; one of the thought's ends is in it.
    """

    seconds = 0.0
    is_over = False  # another thought may begin
    problem = None

    def __init__(
        self, thoughts: ThoughtTokens, budget: int, closing: Sequence[int], vocab_size: int
    ):
        self._thoughts = thoughts
        self._budget = budget
        self._closing = tuple(closing)
        self._bits = [_only(token_id, vocab_size) for token_id in closing]
        self._places = [_Place(thoughts.begins_inside)]

    @property
    def num_tokens(self) -> int:
        return len(self._places) - 1

    def bitmask(self) -> Bits | None:
        place = self._places[-1]
        return self._bits[place.num_forced] if self._is_closing(place) else None

    def parts(self) -> Sequence[MaskPart]:
        return ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        forced = self.forced_tokens(len(token_ids))
        for count, (token_id, other) in enumerate(zip(token_ids, forced, strict=False)):
            if token_id != other:
                return count
        return len(token_ids)

    def forced_tokens(self, most: int) -> Sequence[int]:
        place = self._places[-1]
        if not self._is_closing(place):
            return ()
        return self._closing[place.num_forced : place.num_forced + most]

    def _is_closing(self, place: _Place) -> bool:
        is_spent = place.is_inside and place.num_inside >= self._budget
        return is_spent and not _splits_a_character(place.tail)

    def advance(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            place = self._places[-1]
            following = place.after(token_id, self._thoughts)
            if self._is_closing(place) and token_id == self._closing[place.num_forced]:
                forced = place.num_forced + 1
                following = following._replace(num_forced=forced % len(self._closing))
            self._places.append(following)

    def rollback(self, num_tokens: int) -> None:
        del self._places[len(self._places) - num_tokens :]

    def fork(self) -> ThoughtBudget:
        other = copy(self)
        other._places = self._places.copy()
        return other


def _splits_a_character(text: bytes) -> bool:
    """Tell whether UTF-8 text ends within a character, of which at most three bytes are there."""
    for length in range(1, min(3, len(text)) + 1):
        byte = text[-length]
        if byte >= 0xC0:
            return length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def _only(token_id: int, vocab_size: int) -> Bits:
    bits = array("I", bytes(4 * -(-vocab_size // 32)))
    bits[token_id >> 5] = 1 << (token_id & 31)
    return bits
