"""`Repetition` finds the sequences of a text that its next token would repeat: DRY's penalties.

    tokens    … the quick brown fox … the quick brown ?
                '-------------'       '-------------'   "fox" would make the sequence longer

A token that would go on with a sequence of L tokens, the longest if there are several, costs
``dry_multiplier * dry_base ** (L - dry_allowed_length)`` of its logit, from L = dry_allowed_length
on. No sequence reaches across a breaker, such as a line's end. "Don't repeat yourself" is by p-e-w:
text-generation-webui, pull request 5677.

Lengths are kept up to date as tokens come, at the cost of the places where the newest token has
been before; both bounds below hold that down where somebody repeats on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from octavo.core.sampling_params import SamplingParams

MAX_LENGTH = 64  # longer sequences count as this long
MAX_PLACES = 1024  # of the places of a token, the last ones that are looked at
_MAX_EXPONENT = 80.0  # of e: more than any logit, and a float


class Repetition:
    """The tokens of one request, and how far the text before each repeats the end of them.

    Args:
        breakers: tokens that end a sequence.
    """

    def __init__(self, params: SamplingParams, breakers: Collection[int]):
        self._params, self._breakers = params, breakers
        self._tokens: list[int] = []
        self._places: dict[int, list[int]] = {}
        # By place: how many tokens up to there are the last ones of all.
        self._lengths: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow further tokens."""
        # Those before the last few cannot be part of a sequence that ends with the last one.
        known = max(len(token_ids) - MAX_LENGTH, 0)
        for token_id in token_ids[:known]:
            self._append(token_id)
        if known:
            self._lengths = {}
        for token_id in token_ids[known:]:
            self._lengths = self._extended(token_id)
            self._append(token_id)

    def penalties(self, later: Iterable[int] = ()) -> Mapping[int, float]:
        """Return what each token that would repeat something costs, if ``later`` came next."""
        before, count = self._lengths, len(self._tokens)
        for token_id in later:
            self._lengths = self._extended(token_id)
            self._append(token_id)
        found = self._penalties()
        while len(self._tokens) > count:
            self._places[self._tokens.pop()].pop()
        self._lengths = before
        return found

    def _append(self, token_id: int) -> None:
        self._places.setdefault(token_id, []).append(len(self._tokens))
        self._tokens.append(token_id)

    def _extended(self, token_id: int) -> dict[int, int]:
        """Return the lengths after one more token."""
        if token_id in self._breakers:
            return {}
        lengths = self._lengths
        places = self._places.get(token_id, ())[-MAX_PLACES:]
        return {place: min(lengths.get(place - 1, 0) + 1, MAX_LENGTH) for place in places}

    def _penalties(self) -> dict[int, float]:
        params = self._params
        last_n = params.dry_penalty_last_n
        begin = 0 if last_n < 0 else max(len(self._tokens) - last_n, 0)
        longest: dict[int, int] = {}
        for place, length in self._lengths.items():
            inside = min(length, place - begin + 1)
            if inside >= params.dry_allowed_length:
                token_id = self._tokens[place + 1]
                longest[token_id] = max(longest.get(token_id, 0), inside)
        return {token_id: self._penalty(length) for token_id, length in longest.items()}

    def _penalty(self, length: int) -> float:
        params = self._params
        exponent = (length - params.dry_allowed_length) * math.log(params.dry_base)
        return params.dry_multiplier * math.exp(min(exponent, _MAX_EXPONENT))
