"""Where the last tokens of a text have been before.

For runs of a few lengths, a dictionary has the place after the most recent occurrence of each run,
and an array leads from every place to the one before it with the same run, as the hash chains of
LZ77 compressors do. That finds what a suffix tree finds, as far as one walks the chains, in less:
a tree of depth 24 has up to 24 nodes for a token where this has an entry for each length.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NOWHERE = -1


class Place(NamedTuple):
    """Where a run has ended before: ``position`` is that of the token that followed it."""

    position: int
    length: int  # tokens before it that match, up to the depth of the search


class TokenIndex:
    """An index of a text that grows at its end, and may be dropped from its beginning.

    A token costs O(lengths), once, whenever it is taken in.

    Args:
        lengths: of the runs that are indexed, ascending. Shorter runs are not found; between two
            lengths all are.
        tokens: the text; whoever owns it appends to it, and calls ``catch_up``.
        before: the index of the first tokens of the text, which others may share. It must not
            change any more.
    """

    def __init__(
        self, lengths: Sequence[int], tokens: Sequence[int], before: TokenIndex | None = None
    ):
        self.lengths = tuple(lengths)
        self.tokens = tokens
        self.begin = 0  # the first position that has not been dropped
        self.end: int = before.end if before is not None else 0
        self._before = before
        self._shift = 0  # the position of the first token that is still there
        self._origin = self.end  # the place of the first entry in the arrays is the next one
        self._last: list[dict[int, int]] = [{} for _ in self.lengths]  # by the hash of the run
        self._previous = [array("q") for _ in self.lengths]

    def catch_up(self) -> None:
        """Take in what was appended to the text."""
        tokens, shift, end = self.tokens, self._shift, self._shift + len(self.tokens)
        for level, length in enumerate(self.lengths):
            last, previous = self._last[level], self._previous[level]
            older = self._before._last[level] if self._before is not None else {}
            for place in range(self.end + 1, end + 1):
                at = place - shift
                run = hash(tuple(tokens[max(0, at - length) : at]))
                found = last.get(run)
                previous.append(older.get(run, NOWHERE) if found is None else found)
                last[run] = place
        self.end = end

    def token(self, position: int) -> int:
        """The token at a position between ``begin`` and ``end``."""
        return self.tokens[position - self._shift]

    def drop(self, count: int) -> None:
        """Forget the first ``count`` tokens that are left: they are no place any more.

        Their memory is given back in larger parts. The text has to be a list of this index alone.
        """
        for level, length in enumerate(self.lengths):
            last = self._last[level]
            for place in range(self.begin + 1, self.begin + count + 1):
                at = place - self._shift
                run = hash(tuple(self.tokens[max(0, at - length) : at]))
                if last.get(run) == place:
                    del last[run]
        self.begin += count
        self._give_back()

    def _give_back(self) -> None:
        """Delete what has been dropped, once it is half of all; but for the runs that end later."""
        dead = self.begin - self._shift - self.lengths[-1]
        if dead * 2 <= len(self.tokens):
            return
        assert isinstance(self.tokens, list)
        del self.tokens[:dead]
        for previous in self._previous:
            del previous[:dead]
        self._shift += dead
        self._origin += dead

    @property
    def num_entries(self) -> int:
        """Runs in the dictionaries, which are most of its memory."""
        return sum(map(len, self._last))

    def places(self, context: Sequence[int], limit: int, depth: int) -> list[Place]:
        """Places that ``context`` ends like: the longest match first, of those the most recent.

        At most ``limit`` of them, found by the longest runs; of each length of runs, the ``limit``
        most recent occurrences are looked at. Matches are followed up to ``depth`` tokens.
        """
        found: dict[int, int] = {}
        for level in self._levels_of(context):
            if len(found) < limit:
                found.update(self._walk(level, context, limit, depth))
        return _best_first(found)[:limit]

    def longest(self, context: Sequence[int], limit: int, depth: int) -> Place | None:
        """The best of ``places``, without looking for others."""
        for level in self._levels_of(context):
            if found := self._walk(level, context, limit, depth):
                return _best_first(found)[0]
        return None

    def _levels_of(self, context: Sequence[int]) -> Iterable[int]:
        """The lengths of runs that the context is long enough for, longest first."""
        count = bisect_right(self.lengths, len(context))
        return range(count - 1, -1, -1)

    def _walk(self, level: int, context: Sequence[int], limit: int, depth: int) -> dict[int, int]:
        """Places after the run that the context ends with, most recent first, and the lengths of
        their matches. The end of the text is no place: nothing follows there."""
        length = self.lengths[level]
        run = hash(tuple(context[-length:]))
        place = self._last[level].get(run, NOWHERE)
        if place == NOWHERE and self._before is not None:
            place = self._before._last[level].get(run, NOWHERE)
        found: dict[int, int] = {}
        for _ in range(limit + 1):  # one more, for the end itself
            if place <= self.begin:
                break
            if place < self.end and (matched := self._matched(place, context, length, depth)):
                found[place] = matched
            place = self._previous_of(level, place)
        return found

    def _previous_of(self, level: int, place: int) -> int:
        if place > self._origin:
            return self._previous[level][place - self._origin - 1]
        assert self._before is not None
        return self._before._previous_of(level, place)

    def _matched(self, place: int, context: Sequence[int], length: int, depth: int) -> int:
        """How many tokens before a place are those of the context; 0 if ``length`` are not, whose
        hash is the same by chance."""
        tokens, at = self.tokens, place - self._shift
        if tokens[at - length : at] != context[-length:]:
            return 0
        most = min(depth, at, len(context))
        if tokens[at - most : at] == context[-most:]:
            return most  # often, in text that repeats; and much faster than one by one
        while length < most and tokens[at - 1 - length] == context[-1 - length]:
            length += 1
        return length


def _best_first(found: dict[int, int]) -> list[Place]:
    ordered = sorted([(length, position) for position, length in found.items()], reverse=True)
    return [Place(position, length) for length, position in ordered]
