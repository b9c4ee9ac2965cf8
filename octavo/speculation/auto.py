"""The ``auto`` method, which chooses drafter and draft length of each request at each step.

A draft saves the tokens that are accepted, and costs the rows that it adds to the step and the time
to make it. All three are measured: the acceptance rates of such drafts (proposers give them with
each candidate), the seconds of a step by its rows (``StepTimeEstimator``), and those of drafting.
So drafting adapts by itself: with many requests a further row costs more, and only nearly certain
tokens are drafted; where drafts are rejected there are none; and a request without any is left
alone for some tokens.

    each request      a candidate from earlier text (``suffix``), which costs little to find
    all requests      as many candidate tokens, the likeliest first, as bring the most tokens a
                      second of the step
    those without     a draft of the draft model, if there is one: as many tokens as pay at its
                      acceptance rates
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest, DraftProposer
from octavo.core.lookahead import multi_steps_in_time
from octavo.core.request import Request
from octavo.speculation.analysis import best_drafts
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.model_drafting import ModelDrafting
from octavo.speculation.step_times import StepTimeEstimator

# The share of a step's time that looking for drafts in vain may take, and the least gain of a step
# with drafts.
_ASKING_SHARE = 0.005
_LEAST_GAIN = 1.04
# A request whose drafts do not pay rests for so many tokens, then for twice as many each time, up
# to the longest rest.
_FIRST_REST = 2
_LONGEST_REST = 32
# A single request without drafts decodes in multi-step calls, which are that much faster.
_MULTI_STEP_GAIN = 0.06
# The prior of the tokens that a proposal saves, and the number of proposals of its moving average.
_FIRST_GAIN = 0.2
_GAIN_SPAN = 8
_VARIED_EVERY = 16  # proposals


class CandidateProposer(Protocol):
    """Finds draft candidates in known text, one request at a time, in very little time."""

    def find_candidate(self, request: Request, room: int) -> DraftCandidate | None: ...

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...


@dataclass(slots=True)
class _RequestHistory:
    """The gains of one request's drafts so far, and how long it rests."""

    gain: float = _FIRST_GAIN  # tokens saved by a proposal, a moving average
    num_rests: int = 0  # since a token was accepted
    rests_until: int = 0  # the request has so many tokens
    candidate_proposer: CandidateProposer | None = None  # of the draft that is being verified


class AutoProposer:
    """A ``DraftProposer`` that chooses among others.

    Args:
        candidate_proposers: find candidates in earlier text.
        model: the proposer of a draft model or of heads; None without one.
        max_tokens: the most tokens of a draft.
    """

    def __init__(
        self,
        candidate_proposers: Sequence[CandidateProposer],
        model: DraftProposer | None = None,
        max_tokens: int = 16,
    ):
        self.max_tokens = max_tokens
        self.seconds = 0.0
        self._candidate_proposers = candidate_proposers
        self._model = None if model is None else ModelDrafting(model)
        self._times = StepTimeEstimator()
        self._histories: dict[str, _RequestHistory] = {}
        self._num_proposals = 0
        self._asking_seconds = 0.0  # for one request, lately

    def wants(self, request: Request) -> bool:
        history = self._histories.get(request.request_id)
        return history is None or len(request.token_ids) >= history.rests_until

    def propose(
        self, openings: Sequence[DraftingRequest], batch_tokens: int
    ) -> Mapping[str, Draft]:
        begin = time.perf_counter()
        candidates = [self._best_candidate(opening) for opening in openings]
        asking_seconds = time.perf_counter() - begin
        lengths = self._varied(self._lengths(candidates, batch_tokens), candidates)
        drafts: dict[str, Draft] = {}
        left: list[DraftingRequest] = []  # requests without a candidate, for the draft model
        for opening, candidate, length in zip(openings, candidates, lengths, strict=True):
            request_id = opening.request.request_id
            if candidate is not None and length:
                drafts[request_id] = candidate.first(length).draft()
            else:
                self._histories[request_id].candidate_proposer = None
                left.append(opening)
        if self._model is not None and left:
            rows = batch_tokens + sum(lengths)
            drafts |= self._model.propose(left, rows, self._times.seconds)
        self._schedule_rests(openings, asking_seconds)
        self.seconds += time.perf_counter() - begin
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        begin = time.perf_counter()
        history = self._histories.get(request.request_id)
        if history is not None:
            history.gain += num_accepted / _GAIN_SPAN
            if num_accepted:
                history.num_rests = history.rests_until = 0
            if history.candidate_proposer is not None:
                history.candidate_proposer.observe(request, draft, num_accepted)
            elif self._model is not None:
                self._model.observe(request, draft, num_accepted)
        self.seconds += time.perf_counter() - begin

    def observe_step(self, batch: Batch, seconds: float) -> None:
        self._times.observe(batch, seconds)
        if self._model is not None:
            self._model.observe_step(batch, seconds)

    def forget(self, request: Request) -> None:
        self._histories.pop(request.request_id, None)
        for candidate_proposer in self._candidate_proposers:
            candidate_proposer.forget(request)
        if self._model is not None:
            self._model.forget(request)

    def _best_candidate(self, opening: DraftingRequest) -> DraftCandidate | None:
        """The candidate with the most expected tokens, of all proposers."""
        request = opening.request
        history = self._histories.setdefault(request.request_id, _RequestHistory())
        history.candidate_proposer = None
        best, most = None, 0.0
        for candidate_proposer in self._candidate_proposers:
            candidate = candidate_proposer.find_candidate(request, opening.max_tokens)
            if candidate is not None and candidate.expected_tokens > most:
                best, most, history.candidate_proposer = (
                    candidate,
                    candidate.expected_tokens,
                    candidate_proposer,
                )
        return best

    def _lengths(self, candidates: Sequence[DraftCandidate | None], rows: int) -> list[int]:
        """Tokens of each candidate to draft, in a step of ``rows`` other rows.

        Each other row is taken to bring a token. Rows of a prompt do not, so beside these somewhat
        fewer tokens are drafted than would pay.
        """

        def seconds(count: int) -> float:
            return self._times.seconds(count) * (1.0 if count == rows else _LEAST_GAIN)

        chains = [() if candidate is None else candidate.probabilities for candidate in candidates]
        return best_drafts(chains, seconds, num_rows=rows, num_tokens=rows)

    def _varied(self, lengths: list[int], candidates: Sequence[DraftCandidate | None]) -> list[int]:
        """Lengths that are doubled or halved now and then, so that steps of other sizes are timed
        too."""
        self._num_proposals += any(lengths)
        turn = self._num_proposals % _VARIED_EVERY
        if turn not in (0, _VARIED_EVERY // 2):
            return lengths
        vary = (lambda length: 2 * length) if turn else (lambda length: length // 2)
        return [
            min(vary(length), len(candidate.token_ids)) if candidate is not None else 0
            for length, candidate in zip(lengths, candidates, strict=True)
        ]

    def _schedule_rests(self, openings: Sequence[DraftingRequest], seconds: float) -> None:
        """Let requests rest whose proposals cost more than they save: just so long that looking for
        drafts stays a small share of the time."""
        each = seconds / len(openings)  # one request's share of the time to find candidates
        self._asking_seconds += 0.1 * (each - self._asking_seconds)
        step = self._times.seconds(len(openings)) if self._times.is_known else 1.0
        share = len(openings) * self._asking_seconds / step
        if len(openings) == 1 and multi_steps_in_time(2, step) == 2:
            share += _MULTI_STEP_GAIN
        longest = min(_LONGEST_REST, int(share / _ASKING_SHARE))
        for request, _ in openings:
            history = self._histories[request.request_id]
            history.gain -= history.gain / _GAIN_SPAN
            if history.gain < share and longest:
                rest = min(longest, _FIRST_REST << history.num_rests)
                history.num_rests += rest < longest
                history.rests_until = len(request.token_ids) + 1 + rest
