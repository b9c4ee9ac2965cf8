"""Drafts that cost nothing and mean nothing, to be accepted at random.

With ``synthetic_acceptance_rates`` and no method but ``auto``, a load test wants drafts in every
step, whatever the text allows; :class:`octavo.runtime.acceptance.Synthetic` decides what becomes of
them. With a method that is named, its own drafts are verified so, and its cost is measured too.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request


class SyntheticProposer:
    """Drafts the last token of a request again and again; but none that would end the request.

    Args:
        max_tokens: the length of every draft that there is room for.
    """

    seconds = 0.0

    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def wants(self, request: Request) -> bool:
        return True

    def propose(self, openings: Sequence[DraftingRequest], batch_tokens: int) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for request, room in openings:
            ends = {*request.eos_token_ids, *request.params.stop_token_ids}
            harmless = (t for t in reversed(request.token_ids) if t not in ends)
            token_id = next(harmless, None)
            if token_id is not None:
                count = min(room, self._max_tokens)
                drafts[request.request_id] = Draft.chain([token_id] * count)
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        pass

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass
