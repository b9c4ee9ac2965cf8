"""Implements ``disable_by_batch_size``, no drafts of any method while many requests decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest, DraftProposer
from octavo.core.request import Request


class BatchLimit:
    """A ``DraftProposer`` that asks another one while fewer than ``num_requests`` decode."""

    def __init__(self, proposer: DraftProposer, num_requests: int):
        self._proposer = proposer
        self._num_requests = num_requests

    @property
    def max_tokens(self) -> int:
        return self._proposer.max_tokens

    @property
    def seconds(self) -> float:
        return self._proposer.seconds

    def wants(self, request: Request) -> bool:
        return self._proposer.wants(request)

    def propose(
        self, openings: Sequence[DraftingRequest], batch_tokens: int
    ) -> Mapping[str, Draft]:
        if batch_tokens >= self._num_requests:
            return {}
        return self._proposer.propose(openings, batch_tokens)

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        self._proposer.observe(request, draft, num_accepted)

    def observe_step(self, batch: Batch, seconds: float) -> None:
        self._proposer.observe_step(batch, seconds)

    def forget(self, request: Request) -> None:
        self._proposer.forget(request)
