"""How far a step may go beyond the next token of a request.

Three ways lead there:

- *running ahead*: where steps overlap, the next one may be planned before the last one has ended.
  The token between them is awaited; the executor feeds it to the next step itself;
- *rounds*: a request that is alone may decode several tokens in one call of the executor, which
  saves what lies between two calls;
- *drafts*: guesses at the next tokens, brought by the executor with the results of a step, are
  computed together with the next known token, which costs little while memory is the bound, and
  those that turn out to be right need no step of their own (speculative decoding; Leviathan et
  al., ICML 2023; trees as in SpecInfer, ASPLOS 2024).

The last two show as a ``ScheduledRequest.num_sampled`` above one, and how many tokens come of it is
open until the step has ended; so none of the three is combined with another for one request.
Whatever the way, what is sampled is what single steps would have sampled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from octavo.core.batch import Batch, Draft, ScheduledRequest, StepOutput
from octavo.core.block_manager import BlockManager
from octavo.core.request import Request

# A lone stream gets several tokens of one call, as long as all take no longer than this: readers
# see no difference, and what arrives meanwhile does not wait long.
MAX_ROUNDS = 8
ROUNDS_SECONDS = 0.02


def rounds_in_time(num_sampled: int, round_seconds: float) -> int:
    """Of the rounds that an executor may take, those that it should, if one takes so long."""
    if round_seconds * num_sampled <= ROUNDS_SECONDS:
        return num_sampled
    return max(1, int(ROUNDS_SECONDS / round_seconds))


class Lookahead:
    """Plans rounds and drafts, once it is decided what a step computes anyhow.

    What is planned here takes the budget and the blocks that are left over, and never anybody's
    place: nobody is preempted for a guess.

    Args:
        max_rounds: tokens that a request which is alone may decode in one step.
        runs_ahead: a request may be in several steps at once.
    """

    def __init__(
        self, block_manager: BlockManager, max_rounds: int = 1, *, runs_ahead: bool = False
    ):
        self.block_manager = block_manager
        self.max_rounds = max_rounds
        self.runs_ahead = runs_ahead
        # Of requests whose last step brought one. It is good for the step that comes next.
        self._drafts: dict[str, Draft] = {}

    def plan(
        self, items: Collection[ScheduledRequest], budget: int, *, is_alone: bool
    ) -> tuple[ScheduledRequest, ...]:
        """The items of a step, with the drafts and rounds that they may take.

        ``budget`` is what is left of the step's tokens. Block tables grow by the slots of what is
        planned. ``is_alone``: nobody else is there, who would have to wait for further rounds.
        """
        may_go_in_rounds = is_alone and self.max_rounds > 1
        if not (self._drafts or may_go_in_rounds):
            return tuple(items)
        planned = list(items)
        if self._drafts:
            for index, item in enumerate(planned):
                planned[index] = self._with_draft(item, budget)
                budget -= planned[index].num_tokens - item.num_tokens
        if may_go_in_rounds:
            planned = [self._with_rounds(item) for item in planned]
        return tuple(planned)

    def may_run_ahead(self, request: Request) -> bool:
        """Whether a request in flight may be in one more step.

        If there is anything to compute: not while it is open how many tokens a step brings, and not
        after the last one by length. Not with a draft at hand, which is verified once nothing else
        of the request is in flight. And not under a mask, which has to see the token first.
        """
        return (
            request.num_uncomputed_tokens > 0
            and len(request.token_ids) + request.num_awaited_tokens < request.max_total_tokens
            and request.request_id not in self._drafts
            and not (request.num_awaited_tokens and request.is_masked)
        )

    def take(self, batch: Batch, output: StepOutput) -> None:
        """Remember the drafts that a step brought; those from before it are out of date."""
        if not (self._drafts or output.drafts):
            return
        for item in batch.items:
            if item.samples:
                self.forget(item.request)
        for item in batch.items:
            request = item.request
            draft = output.drafts.get(request.request_id)
            if draft and not request.is_finished:
                self._drafts[request.request_id] = draft

    def forget(self, request: Request) -> None:
        self._drafts.pop(request.request_id, None)

    def _with_draft(self, item: ScheduledRequest, budget: int) -> ScheduledRequest:
        """An item with as much of its request's draft as there are tokens and blocks for."""
        request = item.request
        if not item.samples or request.request_id not in self._drafts:
            return item
        draft = self._drafts.pop(request.request_id)
        # The last token that a request can have is never computed, so it is not worth a guess.
        count = min(len(draft), budget, request.max_total_tokens - item.end - 1)
        if count < 1 or not self._can_hold(item, count):
            return item
        return replace(
            item,
            num_tokens=item.num_tokens + count,
            num_sampled=1 + count,
            draft=draft.first(count),
        )

    def _with_rounds(self, item: ScheduledRequest) -> ScheduledRequest:
        """An item that decodes, with as many rounds as its length and the blocks allow."""
        rounds = min(self.max_rounds, item.request.max_total_tokens - item.end)
        if item.num_tokens == item.num_sampled == 1 < rounds and self._can_hold(item, rounds - 1):
            return replace(item, num_sampled=rounds)
        return item

    def _can_hold(self, item: ScheduledRequest, num_further: int) -> bool:
        """Whether so many tokens may be computed beyond those of an item; then there are slots.

        Not with stop strings, because whether a text contains one is only known between steps; not
        under a mask, which has to see each token before the next; and not on top of a token that
        is still awaited.
        """
        request = item.request
        if request.params.stop or request.is_masked or request.num_tokens_in_flight:
            return False
        return self.block_manager.allocate(request, item.end + num_further)
