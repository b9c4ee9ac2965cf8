"""Steps that go beyond the next token of a request, in one of three ways.

- *Running ahead*: where steps overlap, the next one may be planned before the last one has ended.
  The token between them is awaited; the executor feeds it to the next step itself.
- *Multi-step decoding*: a request that is alone may decode several tokens in one call of the
  executor, which saves the time between two calls.
- *Drafts*: tokens of a ``DraftProposer`` are computed together with the last known one, which costs
  little while memory is the bound; accepted ones need no step of their own (``core/drafting.py``).

The last two show as a ``ScheduledRequest.num_sampled`` above one, and the number of tokens that
come of it is open until the step has ended; so no two of the three are combined for one request. In
every way, the sampled tokens are those that single steps would have sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from octavo.core.batch import Draft, ScheduledRequest
from octavo.core.block_pools import Blocks
from octavo.core.drafting import DraftingRequest, DraftProposer
from octavo.core.request import Request

# A stream that is alone gets several tokens of one call, if all take no longer than this: a reader
# sees no difference, and a new request does not wait long.
MAX_MULTI_STEPS = 8
MULTI_STEP_SECONDS = 0.02


def multi_steps_in_time(num_sampled: int, decode_seconds: float) -> int:
    """Return how many of the possible further tokens a call should decode, if each takes
    ``decode_seconds``."""
    if decode_seconds * num_sampled <= MULTI_STEP_SECONDS:
        return num_sampled
    return max(1, int(MULTI_STEP_SECONDS / decode_seconds))


class Lookahead:
    """Plans drafts and multi-step decoding, once the tokens that a step must compute are chosen.

    These plans take the budget and the blocks that are left over: no request is preempted for a
    draft.

    Args:
        max_multi_steps: tokens that a request which is alone may decode in one step.
        proposer: makes drafts; None for no drafts.
        runs_ahead: a request may be in several steps at once.
    """

    def __init__(
        self,
        block_manager: Blocks,
        max_multi_steps: int = 1,
        proposer: DraftProposer | None = None,
        *,
        runs_ahead: bool = False,
    ):
        self.block_manager: Blocks = block_manager
        self.max_multi_steps = max_multi_steps
        self.proposer = proposer
        self.runs_ahead = runs_ahead

    def plan(
        self, items: Collection[ScheduledRequest], budget: int, *, is_alone: bool
    ) -> tuple[ScheduledRequest, ...]:
        """Return the items of a step, with their drafts and further tokens.

        ``budget`` is what is left of the step's tokens. Block tables grow by the slots of what is
        planned. ``is_alone``: there is no other request that would have to wait.
        """
        planned = tuple(items)
        if self.proposer is not None and budget > 0:
            planned = self._with_drafts(self.proposer, planned, budget)
        if is_alone and self.max_multi_steps > 1:
            planned = tuple(map(self._with_multi_step, planned))
        return planned

    def may_run_ahead(self, request: Request) -> bool:
        """Return whether a request in flight may be in one more step.

        It needs something to compute: so not while the number of tokens that a step brings is open,
        and not after the last one by length. Nor may it run past a token that has to be known
        first: for the executor to go on from it, for drafts of what follows, or for a mask.
        """
        return (
            request.num_uncomputed_tokens > 0
            and len(request.token_ids) + request.num_awaited_tokens < request.max_total_tokens
            and not (request.num_awaited_tokens and self._needs_token(request))
        )

    def _needs_token(self, request: Request) -> bool:
        """Return whether its next step cannot be planned, or run, without the awaited token."""
        return not request.is_fed or request.is_masked or self._drafts(request)

    def _drafts(self, request: Request) -> bool:
        """Return whether the next tokens of a request may be drafted."""
        return (
            self.proposer is not None
            and request.sink_window is None  # drafters read tables from their beginning
            and self.proposer.wants(request)
            and request.params.max_draft_tokens != 0
        )

    def _with_drafts(
        self, proposer: DraftProposer, items: tuple[ScheduledRequest, ...], budget: int
    ) -> tuple[ScheduledRequest, ...]:
        drafting: list[DraftingRequest] = []
        for item in items:
            request = item.request
            if item.num_tokens == item.num_sampled == 1 and self._drafts(request):
                count = min(self._max_draft_tokens(request, proposer.max_tokens), budget)
                if count > 0 and self._can_hold(item, count):
                    drafting.append(DraftingRequest(request, count))
        if not drafting:
            return items
        # Drafting with the model's own layers writes to slots before the step does. They may belong
        # to a block that has to be copied first.
        drafts: Mapping[str, Draft] = {}
        if not self.block_manager.has_due_copies:
            drafts = proposer.propose(drafting, sum(item.num_tokens for item in items))
        limits = {each.request.request_id: each.max_tokens for each in drafting}
        planned = list(items)
        for index, item in enumerate(items):
            request_id = item.request.request_id
            if request_id not in limits:
                continue
            draft = drafts.get(request_id)
            if draft is not None and (count := min(len(draft), limits[request_id], budget)):
                budget -= count
                planned[index] = replace(
                    item, num_tokens=1 + count, num_sampled=1 + count, draft=draft.first(count)
                )
            self.block_manager.trim(item.request, item.start + planned[index].num_tokens)
        return tuple(planned)

    def _max_draft_tokens(self, request: Request, max_tokens: int) -> int:
        """Return how many tokens may be drafted. The last token that a request can have is never
        computed, so it is not worth a draft."""
        asked = request.params.max_draft_tokens
        most = max_tokens if asked is None else min(asked, max_tokens)
        return min(most, request.max_total_tokens - len(request.token_ids) - 1)

    def _with_multi_step(self, item: ScheduledRequest) -> ScheduledRequest:
        """Return an item that decodes as many further tokens as its length and the blocks allow.

        None under a mask, which has to see each token before the next.
        """
        request = item.request
        steps = min(self.max_multi_steps, request.max_total_tokens - item.end)
        steps = self.block_manager.states.cut(request, item.start, steps)
        if item.num_tokens != 1 or item.num_sampled != 1 or steps < 2 or request.is_masked:
            return item
        if self._drafts(request) or not self._can_hold(item, steps - 1):
            return item
        return replace(item, num_sampled=steps)

    def _can_hold(self, item: ScheduledRequest, num_further: int) -> bool:
        """Allocate slots for so many tokens beyond those of an item; False where there is no room,
        or where a token is still awaited."""
        request = item.request
        if request.num_tokens_in_flight:
            return False
        return self.block_manager.allocate(request, item.end + num_further)
