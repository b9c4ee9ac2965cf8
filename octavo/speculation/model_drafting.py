"""Chooses how many tokens a draft model drafts, as many as pay at its acceptance rate.

The length is chosen before drafting, from the acceptance rate of the request and of all requests,
and from the cost of drafting and of the rows that verify. The rate is sampled from its posterior
(Thompson sampling), so that a request with few rejected drafts is tried again soon, and one with
many seldom.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest, DraftProposer
from octavo.core.request import Request

_KEPT = 0.98  # decay of the counts with each draft
_SHARED_WEIGHT = 8.0  # tokens that the rate of all requests weighs as the prior of a new one
_LEAST_GAIN = 1.02  # in tokens a second, for a draft to be made


@dataclass(slots=True)
class _Rate:
    """Counts of accepted and rejected tokens, whose predecessors were accepted."""

    right: float = 1.0
    wrong: float = 1.0

    def take(self, right: int, wrong: int) -> None:
        self.right = _KEPT * self.right + right
        self.wrong = _KEPT * self.wrong + wrong


@dataclass(slots=True)
class _Drafting:
    """A moving average of the seconds of drafting a token."""

    seconds_per_token: float = 0.0
    calls: int = 0

    def take(self, seconds: float, tokens: int) -> None:
        each = seconds / max(1, tokens)
        weight = max(0.1, 1 / (self.calls + 1))
        self.seconds_per_token += weight * (each - self.seconds_per_token)
        self.calls += 1


@dataclass(slots=True)
class ModelDrafting:
    """Asks the proposer ``model`` for drafts of the length that pays."""

    model: DraftProposer
    _shared: _Rate = field(default_factory=_Rate)
    _rates: dict[str, _Rate] = field(default_factory=dict)
    _drafting: _Drafting = field(default_factory=_Drafting)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def propose(
        self,
        openings: Sequence[DraftingRequest],
        batch_tokens: int,
        seconds: Callable[[int], float],
    ) -> Mapping[str, Draft]:
        """Return drafts of the model by request id; none if they do not pay.

        ``seconds``: the seconds of a step by its rows.
        """
        openings = [opening for opening in openings if self.model.wants(opening.request)]
        if not openings:
            return {}
        length = self._length(
            [self._draw(request) for request, _ in openings], batch_tokens, seconds
        )
        if length == 0:
            return {}
        openings = [DraftingRequest(request, min(room, length)) for request, room in openings]
        begin = time.perf_counter()
        drafts = self.model.propose(openings, batch_tokens)
        self._drafting.take(time.perf_counter() - begin, length)
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        wrong = int(num_accepted < max(draft.depths()) + 1)
        for rate in (self._shared, self._rates.get(request.request_id)):
            if rate is not None:
                rate.take(num_accepted, wrong)
        self.model.observe(request, draft, num_accepted)

    def observe_step(self, batch: Batch, seconds: float) -> None:
        self.model.observe_step(batch, seconds)

    def forget(self, request: Request) -> None:
        self._rates.pop(request.request_id, None)
        self.model.forget(request)

    def _draw(self, request: Request) -> float:
        """Sample an acceptance rate from the posterior of a request."""
        rate = self._rates.get(request.request_id)
        if rate is None:
            known = _SHARED_WEIGHT / max(_SHARED_WEIGHT, self._shared.right + self._shared.wrong)
            rate = _Rate(known * self._shared.right, known * self._shared.wrong)
            self._rates[request.request_id] = rate
        return self._random.betavariate(max(rate.right, 0.1), max(rate.wrong, 0.1))

    def _length(self, rates: Sequence[float], rows: int, seconds: Callable[[int], float]) -> int:
        """Tokens to draft for each request for the most tokens a second; 0 if none pay."""
        best, best_length = _LEAST_GAIN * rows / seconds(rows), 0
        tokens = float(rows)  # one for each other row
        reached = [1.0] * len(rates)
        for length in range(1, self.model.max_tokens + 1):
            reached = [value * rate for value, rate in zip(reached, rates, strict=True)]
            tokens += sum(reached)
            drafting = length * self._drafting.seconds_per_token
            speed = tokens / (seconds(rows + length * len(rates)) + drafting)
            if speed > best:
                best, best_length = speed, length
        return best_length
