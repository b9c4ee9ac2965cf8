"""Counts of each token in an answer, kept up to date as tokens come; penalties are computed from
them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class TokenCounts:
    """The distinct tokens of one request, and how often its output has each.

    Tokens are counted as they come, so that a step costs what is new in it. Both arrays only grow,
    in the order in which tokens came first; those of the prompt alone have a count of 0.

    Args:
        prompt_token_ids: the prompt, where its tokens matter.
    """

    def __init__(self, prompt_token_ids: Iterable[int] = ()):
        self.ids: array[int] = array("i", dict.fromkeys(prompt_token_ids))
        self.counts: array[int] = array("i", bytes(4 * len(self.ids)))
        self.num_tokens = 0  # counted tokens of the output
        self._places = {token_id: place for place, token_id in enumerate(self.ids)}

    def advance(self, token_ids: Iterable[int]) -> None:
        """Count further tokens of the output."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
            self.num_tokens += 1

    def place(self, token_id: int) -> int | None:
        """Return the index of a token in the arrays; None if it has not occurred."""
        return self._places.get(token_id)

    def after(self, token_ids: Sequence[int]) -> dict[int, int]:
        """Return what the counts of some tokens would be if they came next."""
        later: dict[int, int] = {}
        for token_id in token_ids:
            place = self._places.get(token_id)
            known = 0 if place is None else self.counts[place]
            later[token_id] = later.get(token_id, known) + 1
        return later


class SeenTokens(NamedTuple):
    """The counts that penalties need: those of a request, a few of them replaced by ``later``."""

    counts: TokenCounts
    later: Mapping[int, int]

    def columns(self) -> tuple[array[int], array[int]]:
        """Return the distinct tokens and their counts, as new arrays."""
        ids, counts = self.counts.ids[:], self.counts.counts[:]
        for token_id, count in self.later.items():
            place = self.counts.place(token_id)
            if place is None:
                ids.append(token_id)
                counts.append(count)
            else:
                counts[place] = count
        return ids, counts
