from __future__ import annotations

import pytest

from octavo.cost.catalogue import entries
from octavo.cost.spec_hf import spec_from_hf
from octavo.planner.page_export import model_json
from octavo.server.api.octavo import specs


@pytest.fixture
def post(fake_engine, create_service, send):
    def post(body):
        router = specs.create_router(create_service(fake_engine))
        return send(router, "POST", "/octavo/spec", json=body)

    return post


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3n-e4b", "kimi-linear-48b-a3b"])
def test_a_config_becomes_a_shape(post, name):
    config = entries()[name]["config"]
    answer = post({"config": config, "name": "mine"})
    assert answer.status_code == 200
    ours = model_json(spec_from_hf(config))
    assert answer.json()["parameters"] == ours["parameters"]
    assert answer.json()["layers"][0]["count"] == ours["layers"][0]["count"]
    assert answer.json()["name"] == "mine"


@pytest.mark.parametrize(
    "config, part",
    [
        ({}, "model_type"),
        ({"model_type": "llamo"}, "llamo"),
        ({**entries()["llama-3.1-8b"]["config"], "hidden_size": "many"}, "hidden_size"),
        ({**entries()["llama-3.1-8b"]["config"], "num_hidden_layers": 10**6}, "num_hidden_layers"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(post, config, part):
    answer = post({"config": config})
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_a_config_has_to_be_an_object(post):
    assert post({"config": [1]}).status_code == 400
    assert post({}).status_code == 400
