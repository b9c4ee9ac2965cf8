"""Suffix decoding (Oliaro et al., arXiv 2411.04975): what followed the last tokens of a request
most often, in its own text and in past answers."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.request import FinishReason, Request
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.match_rates import MatchRates
from octavo.speculation.matching import DEFAULT_TOKENS, MatchedDraft, MatchProposer, TrackedRequest
from octavo.speculation.past_answers import END, PastAnswers
from octavo.speculation.token_index import TokenIndex

# Occurrences that are counted: the most recent ones of the longest matches. They are a sample of
# all, whose shares are near enough, and the work of a guess is bounded by it.
PLACES = 32
# What the observed rate of matches of a length counts, in occurrences: a token that followed once
# of once is not certain.
RATE_WEIGHT = 4.0
# Tokens of past answers that are remembered: of indexes of some hundred bytes a token.
MAX_PAST_TOKENS = 1 << 18


class SuffixProposer(MatchProposer):
    """Guesses the most frequent continuation of the last tokens.

    Every length of match says something else: a long one has few occurrences, a short one many.
    The continuations of each are followed from the longest on, the most frequent token first, and
    the one with the most expected tokens is the guess, be it of the request's own text or of past
    answers. The probability of a token is its share of the occurrences, drawn towards the rate at
    which matches of that length have been right.

    Args:
        max_depth: the longest match, and the longest draft.
        max_past_answers: that are remembered, of all tenants.
        factor: tokens drafted for each token that matches.
        min_probability: a draft ends where the product of its probabilities falls below.
        num_speculative_tokens: the most that is guessed at once; None: as many as share a pass.
        max_past_tokens: of the answers that are remembered.
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
        """A whole answer is remembered for the requests to come, with the last tokens before it,
        so that it is found from its first token on.

        Not of a request that turned guessing off, or is to leave nothing in caches: it takes no
        part in this.
        """
        super().forget(request)
        is_whole = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        takes_part = request.params.max_draft_tokens != 0 and request.params.cache_prompt
        if is_whole and request.num_output_tokens and takes_part:
            begin = max(0, request.num_prompt_tokens - self._max_depth)
            self.past_answers.add(request.cache_salt, request.token_ids[begin:])

    def _look(self, followed: TrackedRequest, request: Request) -> MatchedDraft | None:
        context = request.token_ids[-self._max_depth :]
        past = self.past_answers.of(request.cache_salt) if request.params.cache_prompt else None
        best = self._best(followed.index, context, followed.own, None)
        return best if past is None else self._best(past, context, followed.past, best)

    def _best(
        self,
        index: TokenIndex,
        context: Sequence[int],
        rates: MatchRates,
        best: MatchedDraft | None,
    ) -> MatchedDraft | None:
        """The guess with the most expected tokens, of an index or ``best``."""
        places = index.places(context, PLACES, self._max_depth)
        expected = 0.0 if best is None else best.guess.expected_tokens
        positions: list[int] = []
        for count, (position, matched) in enumerate(places, 1):
            positions.append(position)
            if count < len(places) and places[count].length == matched:
                continue  # those of the same length together
            most = min(self.max_tokens, int(self._factor * matched))
            if most <= expected:
                break  # nor can those that match less
            guess = self._continue(index, positions, matched, most, rates)
            worth = 0.0 if guess is None else guess.expected_tokens
            if guess is not None and worth > expected:
                best, expected = MatchedDraft(guess, matched, rates), worth
        return best

    def _continue(
        self, index: TokenIndex, positions: list[int], matched: int, most: int, rates: MatchRates
    ) -> DraftCandidate | None:
        """The most frequent token after ``positions``, then after those of them that had it, and so
        on. None if an answer ends at all of them."""
        token_ids: list[int] = []
        probabilities: list[float] = []
        product = 1.0
        while len(token_ids) < most:
            followers: dict[int, list[int]] = {}
            for position in positions:
                followers.setdefault(_token(index, position, token_ids), []).append(position + 1)
            # Of the same number, the one that follows the longest match, most recently.
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
    """The token at a position; beyond the end of a text, it is one that has been guessed."""
    return index.token(position) if position < index.end else token_ids[position - index.end]
