"""The ``suffix`` method, suffix decoding (Oliaro et al., arXiv 2411.04975).

It drafts what followed the last tokens most often, in the request's own text and in past answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.request import FinishReason, Request
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.match_rates import MatchRates
from octavo.speculation.matching import DEFAULT_TOKENS, MatchedDraft, MatchProposer, TrackedRequest
from octavo.speculation.past_answers import END, PastAnswers
from octavo.speculation.token_index import TokenIndex

# Occurrences that are counted: the most recent of the longest matches. Such a sample estimates the
# shares well enough, and bounds the work for a draft.
PLACES = 32
# Weight of the observed rate of matches of a length, in occurrences: a token that followed one
# occurrence of one is not certain.
RATE_WEIGHT = 4.0
# Tokens of past answers that are remembered; their indexes take some hundred bytes a token.
MAX_PAST_TOKENS = 1 << 18


class SuffixProposer(MatchProposer):
    """Drafts the most frequent continuation of the last tokens.

    Matches of each length have their own continuation: long ones have few occurrences, short ones
    many. From the longest on, each is followed by its most frequent tokens, and the continuation
    with the most expected tokens is the candidate, of the request's own text or of past answers.
    The probability of a token is its share of the occurrences, drawn towards the rate at which
    matches of that length were right.

    Args:
        max_depth: the longest match, and the longest draft, in tokens.
        max_past_answers: answers that are remembered, of all tenants together.
        factor: the most draft tokens for each token of the match.
        min_probability: a draft ends before the product of its probabilities falls below this.
        num_speculative_tokens: the most tokens of a draft; None: as many as share a kernel pass.
        max_past_tokens: tokens of the answers that are remembered.
    """

    def __init__(
        self,
        max_depth: int = 24,
        max_past_answers: int = 10_000,
        factor: float = 1.0,
        min_probability: float = 0.1,
        num_speculative_tokens: int | None = None,
        max_past_tokens: int = MAX_PAST_TOKENS,
    ):
        lengths = tuple(1 << power for power in range(max_depth.bit_length()))
        most = min(num_speculative_tokens or DEFAULT_TOKENS, max_depth)
        super().__init__(lengths, most, min_probability)
        self._max_depth = max_depth
        self._factor = factor
        self.past_answers = PastAnswers(lengths, max_past_answers, max_past_tokens)

    def forget(self, request: Request) -> None:
        """Remember a complete answer for later requests, with the last tokens of its prompt, so
        that it is found from its first token on.

        Answers of requests that turned drafting off, or caching of their prompt, are not kept.
        """
        super().forget(request)
        is_whole = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        takes_part = request.params.max_draft_tokens != 0 and request.params.cache_prompt
        if is_whole and request.num_output_tokens and takes_part:
            begin = max(0, request.num_prompt_tokens - self._max_depth)
            self.past_answers.add(request.cache_salt, request.token_ids[begin:])

    def _match(self, tracked: TrackedRequest, request: Request) -> MatchedDraft | None:
        context = request.token_ids[-self._max_depth :]
        past = self.past_answers.of(request.cache_salt) if request.params.cache_prompt else None
        best = self._best(tracked.index, context, tracked.own, None)
        return best if past is None else self._best(past, context, tracked.past, best)

    def _best(
        self,
        index: TokenIndex,
        context: Sequence[int],
        rates: MatchRates,
        best: MatchedDraft | None,
    ) -> MatchedDraft | None:
        """The candidate with the most expected tokens, of those of an index and ``best``."""
        places = index.places(context, PLACES, self._max_depth)
        expected = 0.0 if best is None else best.candidate.expected_tokens
        positions: list[int] = []
        for count, (position, matched) in enumerate(places, 1):
            positions.append(position)
            if count < len(places) and places[count].length == matched:
                continue  # matches of the same length are counted together
            most = min(self.max_tokens, int(self._factor * matched))
            if most <= expected:
                break  # shorter matches have fewer tokens still
            candidate = self._continue(index, positions, matched, most, rates)
            worth = 0.0 if candidate is None else candidate.expected_tokens
            if candidate is not None and worth > expected:
                best, expected = MatchedDraft(candidate, matched, rates), worth
        return best

    def _continue(
        self, index: TokenIndex, positions: list[int], matched: int, most: int, rates: MatchRates
    ) -> DraftCandidate | None:
        """Follow the most frequent token after ``positions``, then after those of them that have
        it, and so on. None if answers end there."""
        token_ids: list[int] = []
        probabilities: list[float] = []
        product = 1.0
        while len(token_ids) < most:
            followers: dict[int, list[int]] = {}
            for position in positions:
                followers.setdefault(_token(index, position, token_ids), []).append(position + 1)
            # Of equally frequent tokens the one after the longest, most recent match.
            token_id = max(followers, key=lambda token: len(followers[token]))
            pull = RATE_WEIGHT * rates.rate(matched + len(token_ids))
            probability = (len(followers[token_id]) + pull) / (len(positions) + RATE_WEIGHT)
            product *= probability
            if token_id == END or (token_ids and product < self._min_probability):
                break
            positions = followers[token_id]
            token_ids.append(token_id)
            probabilities.append(probability)
        return DraftCandidate(tuple(token_ids), tuple(probabilities)) if token_ids else None


def _token(index: TokenIndex, position: int, token_ids: list[int]) -> int:
    """The token at a position; beyond the end of the text, the draft token there."""
    return index.token(position) if position < index.end else token_ids[position - index.end]
