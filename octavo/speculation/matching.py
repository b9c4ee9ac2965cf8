"""What the proposers that look for the last tokens of a request in older text have in common."""

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

# A step of eight rows is what the kernels compute in one pass: the last known token and these.
DEFAULT_TOKENS = 7
# A request without anything to go by for so many tokens may run ahead, or go in rounds, until there
# is something again; before that the next token is likely to bring it.
PATIENCE = 8


class MatchedDraft(NamedTuple):
    """A guess, the tokens of the match that it stands on, and the rates of such matches."""

    guess: DraftCandidate
    matched: int
    rates: MatchRates


@dataclass(slots=True)
class TrackedRequest:
    """What is kept of a request.

    ``found`` is what there was to say when it had ``num_tokens`` tokens, and ``num_tokens_found``
    is when it last was anything.
    """

    index: TokenIndex
    own: MatchRates
    past: MatchRates
    num_tokens_found: int
    num_tokens: int = -1
    found: MatchedDraft | None = None


class MatchProposer:
    """Guesses that what followed the last tokens of a request before follows them again.

    Probabilities are those that were observed: each guess is held against the tokens that came,
    whether it was drafted or not, so that rates are learned at no cost.

    Args:
        lengths: of the runs of tokens that are indexed.
        num_speculative_tokens: the most that is guessed at once.
        min_probability: a draft ends where it would be right as a whole less often than that.
    """

    def __init__(self, lengths: Sequence[int], num_speculative_tokens: int, min_probability: float):
        self.max_tokens = num_speculative_tokens
        self.seconds = 0.0
        self._lengths = tuple(lengths)
        self._min_probability = min_probability
        self._own_rates, self._past_rates = MatchRates(), MatchRates()
        self._followed: dict[str, TrackedRequest] = {}
        # By the identity of the prompt, which its index keeps alive: samples of a prompt share it.
        self._prompts: WeakValueDictionary[int, TokenIndex] = WeakValueDictionary()

    def _look(self, followed: TrackedRequest, request: Request) -> MatchedDraft | None:
        """What may come next, ``max_tokens`` of it at most."""
        raise NotImplementedError

    def guess(self, request: Request, room: int) -> DraftCandidate | None:
        """What may follow the known tokens of a request, ``room`` tokens at most (at least 1)."""
        found = self._find(request).found
        return None if found is None else found.guess.first(room)

    def wants(self, request: Request) -> bool:
        followed = self._find(request)
        return len(request.token_ids) - followed.num_tokens_found < PATIENCE

    def propose(self, openings: Sequence[DraftingRequest], batch_tokens: int) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for request, room in openings:
            guess = self.guess(request, room)
            likely = None if guess is None else guess.while_likely(self._min_probability)
            if likely is not None:
                drafts[request.request_id] = likely.draft()
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Nothing is learned from what was drafted that the tokens do not say; see ``_settle``."""
        followed = self._followed.get(request.request_id)
        if followed is not None:
            self._settle(followed, request)

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        followed = self._followed.pop(request.request_id, None)
        if followed is not None:
            self._settle(followed, request)

    def _find(self, request: Request) -> TrackedRequest:
        """A request as it is now. The work is done once for each new state of it."""
        followed = self._followed.get(request.request_id)
        if followed is not None and followed.num_tokens == len(request.token_ids):
            return followed
        begin = time.perf_counter()
        if followed is None:
            followed = self._followed[request.request_id] = self._follow(request)
        self._settle(followed, request)
        followed.index.catch_up()
        followed.found = self._look(followed, request)
        followed.num_tokens = len(request.token_ids)
        if followed.found is not None:
            followed.num_tokens_found = followed.num_tokens
        self.seconds += time.perf_counter() - begin
        return followed

    def _follow(self, request: Request) -> TrackedRequest:
        """Begin with a request: its prompt is indexed, if no other sample of it has been here."""
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

    def _settle(self, followed: TrackedRequest, request: Request) -> None:
        """Hold the last guess against the tokens that came, up to the first that was wrong."""
        found, token_ids = followed.found, request.token_ids
        followed.found, begin = None, followed.num_tokens
        if found is None:
            return
        came = token_ids[begin : begin + len(found.guess.token_ids)]
        followed.num_tokens = -1
        for index, token_id in enumerate(came):
            is_right = found.guess.token_ids[index] == token_id
            found.rates.count(found.matched + index, is_right)
            if not is_right:
                break
