"""The ``ngram`` method, prompt lookup decoding (Saxena, 2023), as ``ngram`` in vLLM.

It drafts what followed the last tokens where they occurred before in the request. That pays where
an answer repeats its prompt or itself: edits, summaries, JSON.
"""

from __future__ import annotations

from octavo.core.request import Request
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.matching import DEFAULT_TOKENS, MatchedDraft, MatchProposer, TrackedRequest
from octavo.speculation.token_index import MatchPlace

# The last row of a draft does not pay if all of it is accepted less often than this.
MIN_PROBABILITY = 0.2
# Of the places that match in the longest indexed run, so many of the most recent are compared, by
# up to so many tokens of context.
PLACES = 16
CONTEXT = 32
# The most lengths of runs that are indexed: of a wider range some are.
MOST_LENGTHS = 8


class NgramProposer(MatchProposer):
    """Drafts what followed the longest earlier occurrence of the last tokens.

    The longest match of ``min_tokens`` to ``max_tokens_of_match`` tokens is taken. Of several, the
    one with the longest common context; then the most recent: an edit or a chat goes on from its
    latest version, where the earliest one (vLLM's choice) would go on from a version since changed.
    If fewer tokens follow the match than a draft has, as in a loop, they are repeated.

    Args:
        min_tokens, max_tokens_of_match: the range of a match's length. Of a range of more than
            eight lengths some are indexed, and the match is the longest among the most recent
            places of the longest indexed run.
        num_speculative_tokens: the most tokens of a draft; None: as many as share a kernel pass.
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

    def _match(self, tracked: TrackedRequest, request: Request) -> MatchedDraft | None:
        index = tracked.index
        place = index.longest(request.token_ids[-self._depth :], PLACES, self._depth)
        if place is None:
            return None
        rates = tracked.own
        lengths = range(place.length, place.length + self.max_tokens)
        candidate = DraftCandidate(
            continuation(request.token_ids, place, self.max_tokens),
            tuple(rates.rate(length) for length in lengths),
        )
        return MatchedDraft(candidate, place.length, rates)


def spread(least: int, most: int) -> tuple[int, ...]:
    """The lengths from ``least`` to ``most``; of a wide range eight, in a constant ratio."""
    if most - least < MOST_LENGTHS:
        return tuple(range(least, most + 1))
    steps = MOST_LENGTHS - 1
    ratio = most / least
    return tuple(sorted({round(least * ratio ** (step / steps)) for step in range(steps + 1)}))


def continuation(token_ids: list[int], place: MatchPlace, count: int) -> tuple[int, ...]:
    """The ``count`` tokens from a place on. At the end of the text they repeat from the place, as a
    text that loops would."""
    position = place.position
    taken = token_ids[position : position + count]
    whole, rest = divmod(count, len(taken))
    return tuple(taken * whole + taken[:rest])
