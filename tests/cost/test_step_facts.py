"""What foretells steps is the same in the other process."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from rank_models import dense, llama_8b

from octavo.base.errors import ConfigError
from octavo.cost.find_device import find_device
from octavo.cost.measured_steps import MeasuredSteps, Spread
from octavo.cost.parallel import Parallel
from octavo.cost.rank_model import Exchange, Experts
from octavo.cost.step_facts import StepFacts, rank_model_of_json
from octavo.cost.work import Span

MEASURED = MeasuredSteps({"pass": 1e-3}, {"decode": Spread(0.9, 1.1)}, 512, 64, 7000)


@pytest.mark.parametrize("measured", [None, MEASURED])
def test_facts_come_back(measured):
    facts = StepFacts(llama_8b(), find_device("epyc-genoa")[0], measured)
    received = StepFacts.of_json(json.loads(json.dumps(facts.as_json())))
    assert received == facts
    costs = [each.step_model().cost([Span(5, 1)]) for each in (facts, received)]
    assert costs[0] == costs[1]
    assert costs[0].compute.source == ("roofline" if measured is None else "measured")


def test_a_model_with_experts_comes_back():
    model = dense(64, 128, 2, 2, 1, 99, parallel=Parallel(tp=2))
    first, *rest = model.matrices
    model = replace(model, matrices=(replace(first, experts=Experts(8, 2, 4)), *rest))
    assert rank_model_of_json(json.loads(json.dumps(asdict(model)))) == model


def test_what_ranks_exchange_comes_back():
    parallel = Parallel(tp=2, scheme="gather")
    model = replace(dense(64, 128, 2, 2, 1, 99, parallel=parallel), exchange=Exchange(9, 99, 8))
    assert rank_model_of_json(json.loads(json.dumps(asdict(model)))) == model


def test_a_device_that_cannot_compute_it_is_refused():
    device = replace(find_device("epyc-genoa")[0], peaks={"int8": 1e12})
    with pytest.raises(ConfigError, match="no peak is known for fp16"):
        StepFacts(llama_8b(), device).step_model()
