"""Who guesses, and how far: chosen for each request at each step, by what it is worth.

A guess is worth the tokens that it will probably save, and costs the rows that it adds to the step
and the time to make it. All three are known by measurement: how often guesses like this one were
right (the guessers say so with each guess, and keep it true), what a step of so many rows takes
(``StepTimeEstimator``), and what it took to draft. So nothing has to be switched off by hand: where there
are many requests, further rows are dear, and only what is nearly certain is guessed; where guesses
fail, there are none; and where there are none for a while, nobody is asked for a while.

    each request      the guess of text that came before (``suffix``), which costs little
    all together      as many of the guessed tokens, the likeliest first, as make the step's tokens
                      per second the most
    the rest          of a model that drafts, if there is one: as many tokens as pay at its rates
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest, DraftProposer
from octavo.core.lookahead import rounds_in_time
from octavo.core.request import Request
from octavo.speculation.analysis import best_drafts
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.model_drafting import ModelDrafting
from octavo.speculation.step_times import StepTimeEstimator

# What asking in vain may take of a step's time, and what a step must gain to be worth the trouble.
_ASKING_SHARE = 0.005
_LEAST_GAIN = 1.04
# A request for which asking does not pay is left alone for so many tokens, and then for twice as
# many each time, up to so many.
_FIRST_REST = 2
_LONGEST_REST = 32
# A lone stream decodes in rounds when nobody is asked, which is that much faster.
_ROUNDS_GAIN = 0.06
# Tokens that asking saves are expected to be so many at first, and judged by about so many times.
_FIRST_GAIN = 0.2
_GAIN_SPAN = 8
_VARIED_EVERY = 16  # drafts


class CandidateProposer(Protocol):
    """Guesses from what is known already: one request after the other, in no time to speak of."""

    def guess(self, request: Request, room: int) -> DraftCandidate | None: ...

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...


@dataclass(slots=True)
class _RequestHistory:
    """How it went with one request so far."""

    gain: float = _FIRST_GAIN  # tokens that were saved each time somebody was asked, lately
    num_rests: int = 0  # since a guess was right
    rests_until: int = 0  # that many tokens
    guesser: CandidateProposer | None = None  # whose guess is being verified


class AutoProposer:
    """A ``DraftProposer`` that chooses among others.

    Args:
        guessers: of text that came before.
        model: a model that drafts, None if there is none.
        max_tokens: of a draft.
    """

    def __init__(
        self,
        guessers: Sequence[CandidateProposer],
        model: DraftProposer | None = None,
        max_tokens: int = 16,
    ):
        self.max_tokens = max_tokens
        self.seconds = 0.0
        self._guessers = guessers
        self._model = None if model is None else ModelDrafting(model)
        self._times = StepTimeEstimator()
        self._standings: dict[str, _RequestHistory] = {}
        self._num_proposals = 0
        self._asking_seconds = 0.0  # for one request, lately

    def wants(self, request: Request) -> bool:
        standing = self._standings.get(request.request_id)
        return standing is None or len(request.token_ids) >= standing.rests_until

    def propose(
        self, openings: Sequence[DraftingRequest], batch_tokens: int
    ) -> Mapping[str, Draft]:
        begin = time.perf_counter()
        guesses = [self._best_guess(opening) for opening in openings]
        asked = time.perf_counter() - begin
        lengths = self._varied(self._lengths(guesses, batch_tokens), guesses)
        drafts: dict[str, Draft] = {}
        left: list[DraftingRequest] = []  # for a model
        for opening, guess, length in zip(openings, guesses, lengths, strict=True):
            request_id = opening.request.request_id
            if guess is not None and length:
                drafts[request_id] = guess.first(length).draft()
            else:
                self._standings[request_id].guesser = None
                left.append(opening)
        if self._model is not None and left:
            rows = batch_tokens + sum(lengths)
            drafts |= self._model.propose(left, rows, self._times.seconds)
        self._note_asking(openings, asked)
        self.seconds += time.perf_counter() - begin
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        begin = time.perf_counter()
        standing = self._standings.get(request.request_id)
        if standing is not None:
            standing.gain += num_accepted / _GAIN_SPAN
            if num_accepted:
                standing.num_rests = standing.rests_until = 0
            if standing.guesser is not None:
                standing.guesser.observe(request, draft, num_accepted)
            elif self._model is not None:
                self._model.observe(request, draft, num_accepted)
        self.seconds += time.perf_counter() - begin

    def observe_step(self, batch: Batch, seconds: float) -> None:
        self._times.observe(batch, seconds)
        if self._model is not None:
            self._model.observe_step(batch, seconds)

    def forget(self, request: Request) -> None:
        self._standings.pop(request.request_id, None)
        for guesser in self._guessers:
            guesser.forget(request)
        if self._model is not None:
            self._model.forget(request)

    def _best_guess(self, opening: DraftingRequest) -> DraftCandidate | None:
        """Of those that are made, the one of which most tokens will be right."""
        request = opening.request
        standing = self._standings.setdefault(request.request_id, _RequestHistory())
        standing.guesser = None
        best, most = None, 0.0
        for guesser in self._guessers:
            guess = guesser.guess(request, opening.room)
            if guess is not None and guess.expected_tokens > most:
                best, most, standing.guesser = guess, guess.expected_tokens, guesser
        return best

    def _lengths(self, guesses: Sequence[DraftCandidate | None], rows: int) -> list[int]:
        """How many tokens of each guess are worth their rows, in a step of ``rows`` others, which
        bring a token each. (Those of a prompt do not: beside them less is guessed.)"""

        def seconds(count: int) -> float:
            return self._times.seconds(count) * (1.0 if count == rows else _LEAST_GAIN)

        chains = [() if guess is None else guess.probabilities for guess in guesses]
        return best_drafts(chains, seconds, num_rows=rows, num_tokens=rows)

    def _varied(self, lengths: list[int], guesses: Sequence[DraftCandidate | None]) -> list[int]:
        """Now and then other lengths than the best: what longer steps take is not known of those
        that are never run."""
        self._num_proposals += any(lengths)
        turn = self._num_proposals % _VARIED_EVERY
        if turn not in (0, _VARIED_EVERY // 2):
            return lengths
        vary = (lambda length: 2 * length) if turn else (lambda length: length // 2)
        return [
            min(vary(length), len(guess.token_ids)) if guess is not None else 0
            for length, guess in zip(lengths, guesses, strict=True)
        ]

    def _note_asking(self, openings: Sequence[DraftingRequest], seconds: float) -> None:
        """Leave those alone for whom asking costs more than it saves, and no longer than it takes
        for asking to be cheap."""
        each = seconds / len(openings)
        self._asking_seconds += 0.1 * (each - self._asking_seconds)
        step = self._times.seconds(len(openings)) if self._times.is_known else 1.0
        share = len(openings) * self._asking_seconds / step
        if len(openings) == 1 and rounds_in_time(2, step) == 2:
            share += _ROUNDS_GAIN
        longest = min(_LONGEST_REST, int(share / _ASKING_SHARE))
        for request, _ in openings:
            standing = self._standings[request.request_id]
            standing.gain -= standing.gain / _GAIN_SPAN
            if standing.gain < share and longest:
                rest = min(longest, _FIRST_REST << standing.num_rests)
                standing.num_rests += rest < longest
                standing.rests_until = len(request.token_ids) + 1 + rest
