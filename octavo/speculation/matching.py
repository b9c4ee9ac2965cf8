"""The base of proposers that search earlier text for a request's last tokens (n-gram, suffix)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.match_rates import MatchRates
from octavo.speculation.token_index import TokenIndex

# The kernels compute eight rows in one pass: the last known token and seven draft tokens.
DEFAULT_TOKENS = 7
# A request without a match for so many tokens is not proposed for (its steps may then overlap, or
# be multi-step) until there is a match again.
PATIENCE = 8


class MatchedDraft(NamedTuple):
    """A candidate, the length of the match that it follows, and the rates that it is judged by."""

    candidate: DraftCandidate
    matched: int
    rates: MatchRates


@dataclass(slots=True)
class TrackedRequest:
    """The index of a request's text, and the latest match in it.

    ``found`` is the match when the request had ``num_tokens`` tokens, None if there was none.
    ``num_tokens_found`` are the tokens that it had at its latest match.
    """

    index: TokenIndex
    own: MatchRates
    past: MatchRates
    num_tokens_found: int
    num_tokens: int = -1
    found: MatchedDraft | None = None


class MatchProposer:
    """A ``DraftProposer`` of the tokens that followed a request's last tokens in earlier text.

    Probabilities are observed rates: each candidate is compared with the tokens that came, whether
    it was drafted or not, so that rates are learned at no cost.

    Args:
        lengths: lengths of the token runs that are indexed.
        num_speculative_tokens: the most tokens of a draft.
        min_probability: a draft ends where all of it would be accepted less often than this.
    """

    def __init__(self, lengths: Sequence[int], num_speculative_tokens: int, min_probability: float):
        self.max_tokens = num_speculative_tokens
        self.seconds = 0.0
        self._lengths = tuple(lengths)
        self._min_probability = min_probability
        self._own_rates, self._past_rates = MatchRates(), MatchRates()
        self._tracked: dict[str, TrackedRequest] = {}
        # By the identity of the prompt, which its index keeps alive: samples of a prompt share it.
        self._prompts: WeakValueDictionary[int, TokenIndex] = WeakValueDictionary()

    def _match(self, tracked: TrackedRequest, request: Request) -> MatchedDraft | None:
        """Find a candidate of at most ``max_tokens`` tokens."""
        raise NotImplementedError

    def find_candidate(self, request: Request, room: int) -> DraftCandidate | None:
        """Find a candidate of at most ``room`` tokens, which is 1 or more."""
        found = self._find(request).found
        return None if found is None else found.candidate.first(room)

    def wants(self, request: Request) -> bool:
        tracked = self._find(request)
        return len(request.token_ids) - tracked.num_tokens_found < PATIENCE

    def propose(self, openings: Sequence[DraftingRequest], batch_tokens: int) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for request, room in openings:
            candidate = self.find_candidate(request, room)
            likely = None if candidate is None else candidate.while_likely(self._min_probability)
            if likely is not None:
                drafts[request.request_id] = likely.draft()
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Learn from the request's tokens, which tell what was accepted; see ``_settle``."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            self._settle(tracked, request)

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._settle(tracked, request)

    def _find(self, request: Request) -> TrackedRequest:
        """Bring a request's index and match up to its tokens, once for each new token."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.num_tokens == len(request.token_ids):
            return tracked
        begin = time.perf_counter()
        if tracked is None:
            tracked = self._tracked[request.request_id] = self._track(request)
        self._settle(tracked, request)
        tracked.index.catch_up()
        tracked.found = self._match(tracked, request)
        tracked.num_tokens = len(request.token_ids)
        if tracked.found is not None:
            tracked.num_tokens_found = tracked.num_tokens
        self.seconds += time.perf_counter() - begin
        return tracked

    def _track(self, request: Request) -> TrackedRequest:
        """Index a new request. Samples of one prompt share the prompt's index."""
        prompt = request.prompt_token_ids
        index = self._prompts.get(id(prompt))
        if index is None:
            index = self._prompts[id(prompt)] = TokenIndex(self._lengths, prompt)
            index.catch_up()
        return TrackedRequest(
            TokenIndex(self._lengths, request.token_ids, index),
            MatchRates(self._own_rates),
            MatchRates(self._past_rates),
            len(request.token_ids),
        )

    def _settle(self, tracked: TrackedRequest, request: Request) -> None:
        """Count the latest candidate's tokens as right or wrong, up to the first wrong one."""
        found, token_ids = tracked.found, request.token_ids
        tracked.found, begin = None, tracked.num_tokens
        if found is None:
            return
        came = token_ids[begin : begin + len(found.candidate.token_ids)]
        tracked.num_tokens = -1
        for index, token_id in enumerate(came):
            is_right = found.candidate.token_ids[index] == token_id
            found.rates.count(found.matched + index, is_right)
            if not is_right:
                break
