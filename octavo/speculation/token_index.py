"""An index of token runs, which finds earlier occurrences of a text's last tokens.

For runs of a few lengths, a dictionary has the place after the most recent occurrence of each run,
and an array links every place to the one before it with the same run, as the hash chains of LZ77
compressors do. It finds what a suffix tree finds, as far as the chains are followed, in less
memory: a tree of depth 24 has up to 24 nodes for a token, this has an entry for each length.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NOWHERE = -1


class MatchPlace(NamedTuple):
    """An earlier occurrence of a run: ``position`` is that of the token after it."""

    position: int
    length: int  # tokens before it that match, up to the depth of the search


class TokenIndex:
    """An index of a text that grows at its end, and can be dropped from its beginning.

    Each token costs O(lengths) once, when it is indexed.

    Args:
        lengths: the lengths of runs that are indexed, ascending. Shorter matches are not found;
            longer ones of any length are.
        tokens: the text. Its owner appends to it, then calls ``catch_up``.
        before: an index of the text's first tokens, which other texts may share and which must not
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
        """Index the tokens that were appended to the text."""
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
        """Drop the first ``count`` remaining tokens, which are not found any more.

        Their memory is freed in larger parts. The text must be a list that only this index uses.
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
        """Delete dropped tokens once they are half of all, but for those of runs that end later."""
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
        """Number of runs in the dictionaries, which take most of the memory."""
        return sum(map(len, self._last))

    def places(self, context: Sequence[int], limit: int, depth: int) -> list[MatchPlace]:
        """Find places whose preceding tokens match the end of ``context``.

        The longest matches come first, the most recent first among equals. At most ``limit`` are
        returned, found by the longest runs; for each run length the ``limit`` most recent
        occurrences are compared, over up to ``depth`` tokens.
        """
        found: dict[int, int] = {}
        for level in self._levels_of(context):
            if len(found) < limit:
                found.update(self._walk(level, context, limit, depth))
        return _best_first(found)[:limit]

    def longest(self, context: Sequence[int], limit: int, depth: int) -> MatchPlace | None:
        """Find the first of ``places`` without searching for the others."""
        for level in self._levels_of(context):
            if found := self._walk(level, context, limit, depth):
                return _best_first(found)[0]
        return None

    def _levels_of(self, context: Sequence[int]) -> Iterable[int]:
        """The run lengths, by index, that the context is long enough for, longest first."""
        count = bisect_right(self.lengths, len(context))
        return range(count - 1, -1, -1)

    def _walk(self, level: int, context: Sequence[int], limit: int, depth: int) -> dict[int, int]:
        """Follow the chain of the run that the context ends with, most recent first: places, and
        the lengths of their matches. The end of the text is left out, since no token follows it."""
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
        """Length of the match before a place, up to ``depth``; 0 if the run has the same hash by
        chance and differs."""
        tokens, at = self.tokens, place - self._shift
        if tokens[at - length : at] != context[-length:]:
            return 0
        most = min(depth, at, len(context))
        if tokens[at - most : at] == context[-most:]:
            return most  # frequent in repetitive text, and much faster than token by token
        while length < most and tokens[at - 1 - length] == context[-1 - length]:
            length += 1
        return length


def _best_first(found: dict[int, int]) -> list[MatchPlace]:
    ordered = sorted([(length, position) for position, length in found.items()], reverse=True)
    return [MatchPlace(position, length) for length, position in ordered]
