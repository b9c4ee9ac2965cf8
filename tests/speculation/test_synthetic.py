from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request
from octavo.runtime.acceptance import SyntheticAcceptance, TypicalAcceptance
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.drafters import acceptance_of
from octavo.speculation.synthetic import SyntheticProposer


def request(prompt: list[int], **params) -> Request:
    return Request("r", prompt, SamplingParams(**params), 0.0, eos_token_ids=(2,))


def test_the_last_token_is_drafted_as_far_as_there_is_room():
    proposer = SyntheticProposer(4)
    drafts = proposer.propose(
        [DraftingRequest(request([5, 6, 7]), 9), DraftingRequest(request([8]), 2)], 2
    )
    assert drafts["r"].token_ids == (8, 8)
    drafts = proposer.propose([DraftingRequest(request([5, 6, 7]), 9)], 1)
    assert drafts["r"].token_ids == (7,) * 4


def test_nothing_is_drafted_that_ends_a_request():
    proposer = SyntheticProposer(1)
    last = request([5, 7, 2, 3], stop_token_ids=[3])
    assert proposer.propose([DraftingRequest(last, 3)], 1)["r"].token_ids == (7,)
    assert proposer.propose([DraftingRequest(request([2, 2]), 3)], 1) == {}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, type(None)),
        ({"acceptance": "exact"}, type(None)),
        ({"acceptance": "typical"}, TypicalAcceptance),
        ({"synthetic_acceptance_rates": [0.5]}, SyntheticAcceptance),
        ({"synthetic_acceptance_rates": [0.5], "acceptance": "typical"}, SyntheticAcceptance),
    ],
)
def test_a_rule_is_what_was_asked_for(fields, kind):
    assert type(acceptance_of(SpeculativeConfig.of(fields))) is kind
    assert acceptance_of(None) is None


def test_a_load_test_gets_as_many_tokens_a_step_as_it_asks_for(tiny_model):
    llm = LLM(str(tiny_model), speculative_config={"synthetic_acceptance_rates": [1.0, 1.0, 0.0]})
    params = SamplingParams(max_tokens=31, ignore_eos=True, temperature=0.0)
    output = llm.generate(["some words"], params)[0].outputs[0]
    assert len(output.token_ids) == 31
    runs = output.token_ids
    # A token of its own, which is drafted and accepted twice, again and again; but at the
    # beginning, as what it says first is the end of text.
    assert runs[0] == 256 and len(set(runs[3:30])) == 9
    assert all(runs[i] == runs[i + 1] == runs[i + 2] for i in range(3, 30, 3))
