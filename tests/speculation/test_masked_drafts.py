"""Drafts of requests with a mask: what it forces is drafted, what it forbids is cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hash_model import FunctionProposer

from octavo.core.batch import Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import AllowedTokens
from octavo.speculation.masked_drafts import MaskedDrafts


class Forcing(AllowedTokens):
    """Forces the same tokens wherever it is asked."""

    def __init__(self, forced, allowed=range(50)):
        super().__init__(allowed, 64)
        self.forced = forced

    def forced_tokens(self, most):
        return self.forced[:most]


def request(mask=None, name="r") -> Request:
    return Request(name, [1, 2], SamplingParams(), 0.0, mask=mask)


def opening(asked: Request, room: int = 16) -> DraftingRequest:
    return DraftingRequest(asked, room)


def drafting(draft: Draft | None) -> FunctionProposer:
    return FunctionProposer(lambda prompt, position: draft)


def test_without_a_drafter_it_wants_only_requests_whose_masks_force_something():
    drafts = MaskedDrafts()
    assert not drafts.wants(request())
    assert not drafts.wants(request(Forcing([])))
    assert drafts.wants(request(Forcing([3])))
    assert drafts.propose([opening(request())], 1) == {}


def test_forced_tokens_are_drafted_as_far_as_there_is_room():
    asked = request(Forcing([3, 4, 5, 6]))
    drafts = MaskedDrafts()
    assert drafts.propose([opening(asked)], 1)["r"].token_ids == (3, 4, 5, 6)
    assert drafts.propose([opening(asked, 2)], 1)["r"].token_ids == (3, 4)


def test_a_drafter_is_asked_for_those_that_have_none():
    forced, free, plain = request(Forcing([3]), "a"), request(Forcing([]), "b"), request(None, "c")
    drafts = MaskedDrafts(drafting(Draft.chain([7, 60, 8])))
    found = drafts.propose([opening(forced), opening(free), opening(plain)], 3)
    assert {name: draft.token_ids for name, draft in found.items()} == {
        "a": (3,),
        "b": (7,),  # 60 is forbidden
        "c": (7, 60, 8),
    }


def test_requests_without_masks_get_what_the_drafter_gives():
    inner = drafting(Draft.chain([60]))
    drafts = MaskedDrafts(inner)
    assert drafts.max_tokens == inner.max_tokens
    openings = [opening(request())]
    assert drafts.propose(openings, 1) == inner.propose(openings, 1)


def test_a_tree_loses_the_branches_that_are_forbidden():
    tree = Draft((7, 60, 8, 61, 9), (-1, -1, 0, 0, 2))
    drafts = MaskedDrafts(drafting(tree))
    assert drafts.propose([opening(request(Forcing([])))], 1)["r"] == Draft((7, 8, 9), (-1, 0, 1))


def test_nothing_is_left_of_a_draft_that_begins_with_a_forbidden_token():
    drafts = MaskedDrafts(drafting(Draft.chain([60, 3])))
    assert drafts.propose([opening(request(Forcing([])))], 1) == {}


def batch(asked: Request, rows: int):
    return SimpleNamespace(items=[SimpleNamespace(num_sampled=rows, num_tokens=rows)])


def run(drafts: MaskedDrafts, asked: Request, seconds, accepted, steps: int = 200) -> list[int]:
    """The lengths of drafts, if steps take so long and so many of their tokens are accepted."""
    lengths = []
    for _ in range(steps):
        found = drafts.propose([opening(asked)], 1).get("r")
        lengths.append(0 if found is None else len(found))
        if found is not None:
            drafts.observe(asked, found, min(accepted, len(found)))
        drafts.observe_step(batch(asked, 1 + lengths[-1]), seconds(1 + lengths[-1]))
    return lengths


def test_drafts_go_on_where_they_are_accepted_and_rows_cost_little():
    lengths = run(MaskedDrafts(), request(Forcing([3, 4, 5])), lambda rows: 1 + 0.1 * rows, 3)
    assert sum(lengths) > 0.9 * 3 * len(lengths)


@pytest.mark.parametrize(("power", "accepted"), [(1.2, 3), (0.2, 0)])
def test_there_are_few_where_rows_cost_more_than_steps_or_the_model_writes_otherwise(
    power, accepted
):
    lengths = run(MaskedDrafts(), request(Forcing([3, 4, 5])), lambda rows: rows**power, accepted)
    assert sum(lengths[50:]) < 0.2 * 3 * len(lengths[50:])


def test_a_request_that_ends_leaves_nothing_behind():
    drafts, asked = MaskedDrafts(drafting(None)), request(Forcing([3]))
    drafts.propose([opening(asked)], 1)
    drafts.forget(asked)
    assert not drafts._rates and not drafts._lengths
