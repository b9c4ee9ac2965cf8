"""How far a step may go beyond the next token of a request.

Three ways lead there:

- *running ahead*: where steps overlap, the next one may be planned before the last one has ended.
  The token between them is awaited; the executor feeds it to the next step itself;
- *multi-step scheduling*: requests that only decode may take several steps in one call of the
  executor, each from the token of the one before, which saves what lies between two calls;
- *drafts*: guesses at the next tokens, of a ``DraftProposer``, are computed together with the last
  known one, which costs little while memory is the bound; those that turn out to be right need no
  step of their own (``core/drafting.py``).

The last two show as a ``ScheduledRequest.num_sampled`` above one, and how many tokens come of it is
open until the step has ended; so none of the three is combined with another for one request.
Whatever the way, what is sampled is what single steps would have sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from octavo.core.batch import Draft, ScheduledRequest
from octavo.core.block_manager import BlockManager
from octavo.core.drafting import DraftingRequest, DraftProposer
from octavo.core.request import Request

# A lone stream gets several tokens of one call, as long as all take no longer than this: readers
# see no difference, and what arrives meanwhile does not wait long.
MAX_MULTI_STEPS = 8
MULTI_STEP_SECONDS = 0.02


def multi_steps_in_time(num_sampled: int, decode_seconds: float) -> int:
    """Return how many of the planned decode steps fit into MULTI_STEP_SECONDS, at least one."""
    if decode_seconds * num_sampled <= MULTI_STEP_SECONDS:
        return num_sampled
    return max(1, int(MULTI_STEP_SECONDS / decode_seconds))


class Lookahead:
    """Plans multi-step decoding and drafts, once it is decided what a step computes anyhow.

    What is planned here takes the budget and the blocks that are left over, and never anybody's
    place: nobody is preempted for a guess.

    Args:
        max_multi_steps: tokens that a request which is alone may decode in one step.
        proposer: who makes drafts, None for nobody.
        runs_ahead: a request may be in several steps at once.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_multi_steps: int = 1,
        proposer: DraftProposer | None = None,
        *,
        runs_ahead: bool = False,
    ):
        self.block_manager = block_manager
        self.max_multi_steps = max_multi_steps
        self.proposer = proposer
        self.runs_ahead = runs_ahead

    def plan(
        self, items: Collection[ScheduledRequest], budget: int, *, is_alone: bool
    ) -> tuple[ScheduledRequest, ...]:
        """The items of a step, with the drafts and the further decode steps that they may take.

        ``budget`` is what is left of the step's tokens. Block tables grow by the slots of what is
        planned. ``is_alone``: nobody else is there, who would have to wait for further steps.
        """
        planned = tuple(items)
        if self.proposer is not None and budget > 0:
            planned = self._with_drafts(self.proposer, planned, budget)
        if is_alone and self.max_multi_steps > 1:
            planned = tuple(map(self._with_multi_step, planned))
        return planned

    def may_run_ahead(self, request: Request) -> bool:
        """Whether a request in flight may be in one more step.

        If there is anything to compute: not while it is open how many tokens a step brings, and not
        after the last one by length. And not past a token that has to be known first: for the
        executor to go on from it, for guesses at what follows, or for a mask, which has to see it.
        """
        return (
            request.num_uncomputed_tokens > 0
            and len(request.token_ids) + request.num_awaited_tokens < request.max_total_tokens
            and not (request.num_awaited_tokens and self._needs_token(request))
        )

    def _needs_token(self, request: Request) -> bool:
        """Whether its next step cannot be planned, or run, without the awaited token."""
        return not request.is_fed or request.is_masked or self._drafts(request)

    def _drafts(self, request: Request) -> bool:
        """Whether somebody may guess at the next tokens of a request."""
        return (
            self.proposer is not None
            and request.sink_window is None  # drafters read tables from their beginning
            and request.params.max_draft_tokens != 0
            and self.proposer.wants(request)
        )

    def _with_drafts(
        self, proposer: DraftProposer, items: tuple[ScheduledRequest, ...], budget: int
    ) -> tuple[ScheduledRequest, ...]:
        openings: list[DraftingRequest] = []
        for item in items:
            request = item.request
            if item.num_tokens == item.num_sampled == 1 and self._drafts(request):
                room = min(self._room(request, proposer.max_tokens), budget)
                if room > 0 and self._can_hold(item, room):
                    openings.append(DraftingRequest(request, room))
        if not openings:
            return items
        # Who drafts with the model's own layers writes to slots before the step does. Those may be
        # of a block that has to be copied first.
        drafts: Mapping[str, Draft] = {}
        if not self.block_manager.has_due_copies:
            drafts = proposer.propose(openings, sum(item.num_tokens for item in items))
        rooms = {opening.request.request_id: opening.room for opening in openings}
        planned = list(items)
        for index, item in enumerate(items):
            request_id = item.request.request_id
            if request_id not in rooms:
                continue
            draft = drafts.get(request_id)
            if draft is not None and (count := min(len(draft), rooms[request_id], budget)):
                budget -= count
                planned[index] = replace(
                    item, num_tokens=1 + count, num_sampled=1 + count, draft=draft.first(count)
                )
            self.block_manager.trim(item.request, item.start + planned[index].num_tokens)
        return tuple(planned)

    def _room(self, request: Request, max_tokens: int) -> int:
        """How many tokens may be guessed. The last one that a request can have is never computed,
        so it is not worth a guess."""
        asked = request.params.max_draft_tokens
        most = max_tokens if asked is None else min(asked, max_tokens)
        return min(most, request.max_total_tokens - len(request.token_ids) - 1)

    def _with_multi_step(self, item: ScheduledRequest) -> ScheduledRequest:
        """Return an item that decodes with as many steps as its length and the blocks allow.

        Not under a mask, which has to see each token before the next.
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
        """Whether so many tokens may be computed beyond those of an item; then there are slots.

        Not on top of a token that is still awaited.
        """
        request = item.request
        if request.num_tokens_in_flight:
            return False
        return self.block_manager.allocate(request, item.end + num_further)
