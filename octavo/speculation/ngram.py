"""Prompt lookup: what followed the last tokens of a request before (Saxena, 2023; the ``ngram``
method of vLLM). Right where an answer repeats its prompt or itself: edits, summaries, JSON."""

from __future__ import annotations

from octavo.core.request import Request
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.matching import DEFAULT_TOKENS, MatchedDraft, MatchProposer, TrackedRequest
from octavo.speculation.token_index import Place

# A draft that is wrong as a whole more often than this does not pay for its last row.
MIN_PROBABILITY = 0.2
# Where several places match in the longest run that is indexed: how many are compared by what lies
# before it, and how far.
PLACES = 16
CONTEXT = 32
# Lengths of runs that are indexed. A wider range has some of its lengths only.
MOST_LENGTHS = 8


class NgramProposer(MatchProposer):
    """Guesses what followed the longest run of last tokens that has been there before.

    The longest of ``min_tokens`` to ``max_tokens_of_match`` tokens decides. Of several places with
    it, that with the most further tokens in common, which knows more of the context; then the most
    recent: an edit or a chat goes on from its latest version, where the earliest place (vLLM's
    choice) would go on from the one that was changed. A recent place has little after it, as in a
    loop of a few tokens; then the guess goes round in it, so no place is short.

    Args:
        min_tokens, max_tokens_of_match: of a match. In a range of more than eight lengths, a match
            is the longest among the most recent places of the longest run that is indexed.
        num_speculative_tokens: the most that is guessed at once; None: as many as share a pass.
    """

    def __init__(
        self,
        min_tokens: int = 2,
        max_tokens_of_match: int = 5,
        num_speculative_tokens: int | None = None,
    ):
        super().__init__(
            spread(min_tokens, max_tokens_of_match),
            num_speculative_tokens or DEFAULT_TOKENS,
            MIN_PROBABILITY,
        )
        self._depth = max(CONTEXT, max_tokens_of_match)

    def _look(self, followed: TrackedRequest, request: Request) -> MatchedDraft | None:
        index = followed.index
        place = index.longest(request.token_ids[-self._depth :], PLACES, self._depth)
        if place is None:
            return None
        rates = followed.own
        lengths = range(place.length, place.length + self.max_tokens)
        guess = DraftCandidate(
            continuation(request.token_ids, place, self.max_tokens),
            tuple(rates.rate(length) for length in lengths),
        )
        return MatchedDraft(guess, place.length, rates)


def spread(least: int, most: int) -> tuple[int, ...]:
    """The lengths from ``least`` to ``most``, or some of them, evenly by their ratio."""
    if most - least < MOST_LENGTHS:
        return tuple(range(least, most + 1))
    steps = MOST_LENGTHS - 1
    ratio = most / least
    return tuple(sorted({round(least * ratio ** (step / steps)) for step in range(steps + 1)}))


def continuation(token_ids: list[int], place: Place, count: int) -> tuple[int, ...]:
    """``count`` tokens from a place on. At the end of the text it goes on from the place again,
    which is what follows if the text goes on as it did from there."""
    position = place.position
    taken = token_ids[position : position + count]
    whole, rest = divmod(count, len(taken))
    return tuple(taken * whole + taken[:rest])
