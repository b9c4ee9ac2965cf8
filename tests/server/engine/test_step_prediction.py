"""The facts by which an engine's steps are predicted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
from rank_models import llama_8b

from octavo.base.errors import ConfigError
from octavo.cost.find_device import find_device
from octavo.cost.measured_steps import MeasuredSteps, Spread
from octavo.server.engine import step_prediction
from octavo.server.engine.generation import EngineFacts
from octavo.server.engine.step_prediction import step_facts

RUNS_AS = {"device": "cpu", "threads": 2, "kv_dtype": "bfloat16"}
FACTS = EngineFacts(64, 8, 99, 10, 4, rank_model=asdict(llama_8b()), runs_as=RUNS_AS)
DEVICE = find_device("epyc-genoa")[0]


@dataclass
class Calibrated:
    about: dict[str, Any] = field(default_factory=lambda: {"model": "m.gguf", **RUNS_AS})
    steps: MeasuredSteps = MeasuredSteps({"pass": 1e-3}, {"decode": Spread(1, 1)}, 1, 1, 1)


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    monkeypatch.setattr(step_prediction, "device_of_engine", {"cpu": DEVICE}.__getitem__)


def test_without_a_calibration_by_the_roofline():
    found = step_facts(FACTS, None)
    assert (found.model, found.device, found.measured) == (llama_8b(), DEVICE, None)


def test_a_calibration_counts_if_the_engine_runs_as_it_did():
    assert step_facts(FACTS, Calibrated()).measured is Calibrated.steps
    other = replace(FACTS, runs_as={**RUNS_AS, "threads": 1})
    assert step_facts(other, Calibrated()).measured is None


def test_an_engine_without_weights_says_nothing():
    with pytest.raises(ConfigError, match="does not report its weights"):
        step_facts(replace(FACTS, rank_model={}), None)
