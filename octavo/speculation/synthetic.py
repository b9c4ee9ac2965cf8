"""Synthetic drafts for load tests, which cost nothing to make and are accepted at random.

They are used for ``synthetic_acceptance_rates`` with method ``auto``: a load test needs a draft in
every step, whatever the text is, and :class:`octavo.runtime.acceptance.Synthetic` accepts its
tokens at the given rates. With any other method that method's own drafts are accepted at these
rates, so that its cost is measured too.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request


class SyntheticProposer:
    """Drafts the last token of a request repeatedly, skipping tokens that would end the request.

    Args:
        max_tokens: tokens of each draft, unless there is room for fewer.
    """

    seconds = 0.0

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens

    def wants(self, request: Request) -> bool:
        return True

    def propose(self, openings: Sequence[DraftingRequest], batch_tokens: int) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for request, room in openings:
            ends = {*request.eos_token_ids, *request.params.stop_token_ids}
            harmless = (t for t in reversed(request.token_ids) if t not in ends)
            token_id = next(harmless, None)
            if token_id is not None:
                count = min(room, self.max_tokens)
                drafts[request.request_id] = Draft.chain([token_id] * count)
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        pass

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass
