"""``POST /octavo/simulate``: a process of its own runs it, and what is wrong is said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from octavo.page.serving_runs import BOUNDS, CHOICES, SHARES
from octavo.server.api.octavo import simulations

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def post(fake_engine, create_service, send, tiny_model):
    def post(body):
        service = replace(create_service(fake_engine), model_path=tiny_model)
        router = simulations.create_router(service)
        return send(router, "POST", "/octavo/simulate", json=body)

    return post


@pytest.mark.slow
def test_a_load_is_simulated(post):
    asked = {"model": "llama-3.1-8b", "hardware": "H100 SXM", "max_num_seqs": 100}
    answer = post(asked)
    assert answer.status_code == 200
    found = answer.json()
    assert [run["share"] for run in found["runs"]] == list(SHARES)
    assert found["settings"].items() >= asked.items()


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"model": "../../secret"}, "no model of the catalogue"),
        ({"model": "llama-3.1-405b"}, "does not fit"),
        ({"config": {"model_type": "llamo"}}, "llamo"),
        ({"model": None, "config": CONFIG}, "give its name"),
        ({"hardware": "/etc/passwd"}, "no device"),
        ({"replicas": 1000}, "replicas"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(post, changes, part):
    answer = post({"model": "llama-3.1-8b", "hardware": "H100 SXM", **changes})
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_what_is_served_here_is_simulated_from_its_files(post, monkeypatch, tiny_model):
    async def repeat(self, question, tenant):
        return json.dumps(question).encode()

    monkeypatch.setattr(simulations.BoundedSubprocess, "answer", repeat)
    asked = post({"hardware": "auto"}).json()
    assert (asked["model"], asked["path"]) == ("tiny", str(tiny_model))
    assert asked["device"] == "cpu"
    asked = post({"model": "mine", "config": CONFIG, "hardware": "H100 SXM"}).json()
    assert asked["config"] == CONFIG and "path" not in asked


def test_it_knows_the_bounds_of_the_simulator():
    offered = simulations.SimulationRequest.model_json_schema()["properties"]
    for name, bounds in BOUNDS.items():
        assert (offered[name]["minimum"], offered[name]["maximum"]) == bounds
        assert all(bounds[0] <= choice <= bounds[1] for choice in CHOICES[name])
