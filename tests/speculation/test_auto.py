"""The choice of drafts and their lengths, and requests that rest where drafts do not pay."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.speculation.auto import AutoProposer
from octavo.speculation.draft_candidates import DraftCandidate
from octavo.speculation.model_drafting import ModelDrafting


def request_of(name: str = "a", num_tokens: int = 20) -> Request:
    return Request(name, [1] * num_tokens, SamplingParams(), 0.0)


def linear(row_cost: float):
    return lambda rows: 1.0 + row_cost * (rows - 1)


class Oracle:
    """Drafts the same tokens, with the same probability each; right or wrong as told."""

    def __init__(self, probability: float = 0.9, length: int = 8, seed: int = 0):
        self.probability, self.length = probability, length
        self.num_asked = self.num_observed = 0
        self.forgotten: list[str] = []

    def find_candidate(self, request: Request, room: int) -> DraftCandidate | None:
        self.num_asked += 1
        count = min(self.length, room)
        if not count:
            return None
        return DraftCandidate(tuple(range(100, 100 + count)), (self.probability,) * count)

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        self.num_observed += 1

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)


class Drafting:
    """A model that drafts: tokens of its own, as many as there is room for."""

    max_tokens = 6
    seconds = 0.0

    def __init__(self) -> None:
        self.rooms: list[int] = []

    def wants(self, request: Request) -> bool:
        return True

    def propose(self, openings, batch_tokens):
        self.rooms += [room for _, room in openings]
        return {each.request.request_id: Draft.chain(range(each.max_tokens)) for each in openings}

    def observe(self, request, draft, num_accepted): ...

    def observe_step(self, batch, seconds): ...

    def forget(self, request): ...


def run(proposer: AutoProposer, request: Request, accepts, seconds, num_steps: int) -> list[int]:
    """Steps of a lone request; the lengths of its drafts. ``accepts`` says how much of one is
    right, ``seconds`` what a step of so many rows takes."""
    lengths = []
    for _ in range(num_steps):
        draft = None
        if proposer.wants(request):
            draft = proposer.propose([DraftingRequest(request, 16)], 1).get(request.request_id)
        count = 0 if draft is None else len(draft)
        item = ScheduledRequest(request, len(request.token_ids) - 1, 1 + count, 1 + count, draft)
        proposer.observe_step(Batch(0, (item,)), seconds(1 + count))
        num_accepted = 0 if draft is None else accepts(draft)
        request.token_ids += [5] * (1 + num_accepted)
        if draft is not None:
            proposer.observe(request, draft, num_accepted)
        lengths.append(count)
    return lengths


# -- who, and when -------------------------------------------------------------------------------


def test_the_candidate_with_more_expected_tokens_is_taken():
    short, long = Oracle(0.95, 1), Oracle(0.9, 8)
    proposer = AutoProposer([short, long])
    request = request_of()
    drafts = proposer.propose([DraftingRequest(request, 16)], 1)
    assert len(drafts["a"]) > 1
    proposer.observe(request, drafts["a"], 2)
    assert (short.num_observed, long.num_observed) == (0, 1)
    proposer.forget(request)
    assert short.forgotten == long.forgotten == ["a"]


def test_dear_rows_make_drafts_short():
    lengths = {}
    for row_cost in (0.05, 0.5, 2.0):
        proposer = AutoProposer([Oracle(0.7)])
        lengths[row_cost] = run(
            proposer, request_of(), lambda draft: min(1, len(draft)), linear(row_cost), 200
        )[-1]
    assert lengths[0.05] > lengths[0.5] > lengths[2.0] == 0


def test_who_is_asked_in_vain_is_left_alone_for_a_while():
    nothing = Oracle(length=0)
    run(AutoProposer([nothing]), request_of(), len, lambda rows: 0.005, 400)
    assert nothing.num_asked < 400 / 3
    useful = Oracle(0.9)
    run(AutoProposer([useful]), request_of(), len, lambda rows: 0.005, 100)
    assert useful.num_asked == 100


def test_who_has_gained_by_asking_is_asked_on_for_longer():
    """A text that copies, and now and then says something of its own."""

    def steps_until_rest(num_gained: int) -> int:
        candidate_proposer = Oracle(0.9)
        proposer, request = AutoProposer([candidate_proposer]), request_of()
        run(proposer, request, len, lambda rows: 0.005, num_gained)
        candidate_proposer.length = 0
        asked = candidate_proposer.num_asked
        run(proposer, request, len, lambda rows: 0.005, 60)
        vain = candidate_proposer.num_asked - asked
        assert vain < 60  # not for ever
        return vain

    assert steps_until_rest(0) < steps_until_rest(2) < steps_until_rest(10)


def test_where_steps_are_long_asking_costs_nothing_and_goes_on():
    """Several requests, none of which could decode several steps in one call."""
    nothing = Oracle(length=0)
    proposer = AutoProposer([nothing])
    requests = [request_of(name) for name in "ab"]
    for _ in range(100):
        asked = [DraftingRequest(each, 8) for each in requests if proposer.wants(each)]
        if asked:
            proposer.propose(asked, 2)
        items = tuple(ScheduledRequest(each, len(each.token_ids) - 1, 1, 1) for each in requests)
        proposer.observe_step(Batch(0, items), 1.0)
        for each in requests:
            each.token_ids.append(3)
    assert nothing.num_asked == 200


@pytest.mark.parametrize(("probability", "expected"), [(0.5, 0), (0.99, 32 * 4)])
def test_among_many_only_nearly_certain_tokens_are_drafted(probability, expected):
    """What a row costs, all who share the step pay."""
    proposer = AutoProposer([Oracle(probability, 4)])
    plain = ScheduledRequest(request_of(), 19, 1, 1)
    for rows in (20, 32, 60, 100, 160, 200):
        proposer.observe_step(Batch(0, (plain,) * rows), 0.005 * (1 + 0.16 * (rows - 1)))
    openings = [DraftingRequest(request_of(str(index)), 8) for index in range(32)]
    drafts = proposer.propose(openings, 32)
    assert sum(map(len, drafts.values())) == expected


def test_a_draft_for_one_is_weighed_against_all_that_share_its_step():
    proposer = AutoProposer([Oracle(0.5, 4)])
    assert proposer.propose([DraftingRequest(request_of(), 8)], 1)
    assert not AutoProposer([Oracle(0.5, 4)]).propose([DraftingRequest(request_of(), 8)], 32)


# -- a model that drafts ---------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "expected"), [(1.0, range(5, 7)), (0.0, range(1))])
def test_a_model_drafts_as_far_as_it_is_right(right, expected):
    model = Drafting()
    proposer = AutoProposer([], model)
    rng = random.Random(4)

    def accepts(draft):
        return sum(1 for _ in itertools.takewhile(lambda _: rng.random() < right, draft.token_ids))

    lengths = run(proposer, request_of(), accepts, linear(0.1), 300)
    tail = lengths[-100:]
    assert sum(length in expected for length in tail) > 85
    if not right:
        assert 0 < sum(map(bool, lengths[100:])) < 30  # it is tried again, rarely


def test_a_model_drafts_where_the_text_has_no_match():
    model, text = Drafting(), Oracle(0.9, 4)
    proposer = AutoProposer([text], model)
    silent = request_of("b")
    text.find_candidate = lambda request, room: (  # type: ignore[method-assign]
        DraftCandidate((7, 8), (0.9, 0.9)) if request.request_id == "a" else None
    )
    drafts = proposer.propose([DraftingRequest(request_of(), 8), DraftingRequest(silent, 8)], 2)
    assert drafts["a"].token_ids == (7, 8)
    assert "b" not in drafts or drafts["b"].token_ids[0] == 0
    assert len(model.rooms) <= 1


def test_what_drafting_takes_counts():
    arm = ModelDrafting(Drafting())
    arm._drafting.take(seconds=6.0, tokens=6)  # a second a token, as long as a step
    for _ in range(20):
        assert arm.propose([DraftingRequest(request_of(), 6)], 1, linear(0.1)) == {}
