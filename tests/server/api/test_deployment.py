from __future__ import annotations

import json
from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.cost import this_machine
from octavo.cost.catalogue import entries, spec_of
from octavo.cost.engine_profile import Limits
from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.page.deployments import EngineChoice, deployment_of
from octavo.planner.formulas import deployment_document
from octavo.planner.page_export import hardware_json, model_json
from octavo.server.api.octavo import deployment

DEVICE = replace(find_device("epyc-genoa")[0], is_measured=True, source="kept in /home/me")


@pytest.fixture
def ask(fake_engine, create_service, send, tiny_model, monkeypatch):
    """The answer about a server of these files, on a device that is known or not."""

    def ask(path=tiny_model, device=DEVICE, body=None):
        def find(kind):
            if device is None:
                raise ConfigError("its ceilings have not been measured yet")
            return device

        monkeypatch.setattr(this_machine, "device_of_engine", find)
        service = replace(create_service(fake_engine), model_path=path)
        if body is None:
            return send(deployment.create_router(service), "GET", "/octavo/deployment")
        router = deployment.create_router(service)
        return send(router, "POST", "/octavo/deployments", json={"hardware": "auto", **body})

    return ask


def test_model_device_and_settings_are_told(ask, tiny_model, fake_engine):
    told = ask().json()
    model = model_json(open_spec(tiny_model))
    assert told["model"] == {**model, "name": "tiny"}
    assert told["model"]["published"]["kind"] == "stored"
    engines = hardware_json([DEVICE])["devices"][0]["engines"]
    assert told["hardware"]["devices"][0]["engines"] == {k: list(v) for k, v in engines.items()}
    facts = fake_engine.facts
    length = min(facts.max_model_len, model["max_position"])
    assert told["settings"]["max_model_len"] == length
    assert told["settings"]["max_num_seqs"] == facts.max_num_seqs
    assert told["unknown"] == []


def test_no_place_on_this_machine_is_told(ask, tiny_model, tmp_path):
    assert "/home/me" not in ask().text
    assert str(tiny_model.parent) not in ask().text
    lost = tmp_path / "secret" / "gone"
    assert "secret" not in ask(lost).text


def test_what_is_not_known_is_null_and_said(ask, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llamo"}')
    told = ask(tmp_path, None).json()
    assert told["model"] is told["hardware"] is None
    assert [text.partition(":")[0] for text in told["unknown"]] == ["model", "hardware"]
    assert "llamo" in told["unknown"][0]
    assert "not been measured" in told["unknown"][1]


# -- any model on any device ----------------------------------------------------------------------


def document(spec, device, layout, **choice):
    """As the planner has it, after a way through JSON."""
    found = deployment_of(spec, device, EngineChoice(**choice), Parallel(**layout))
    return json.loads(json.dumps(deployment_document(found)))


def documents(answer):
    assert answer.status_code == 200, answer.text
    return [each["document"] for each in answer.json()["deployments"]]


H100 = {"hardware": "H100 SXM"}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_a_model_of_the_catalogue_on_a_device(ask, name):
    layouts = [{}, {"tp": 4}, {"tp": 2, "pp": 2}]
    asked = {**H100, "model": name, "quantization": "fp8", "kv_cache_dtype": "fp8"}
    found = documents(ask(body={**asked, "layouts": layouts, "max_num_seqs": 7}))
    choice = {"quantization": "fp8", "kv_cache_dtype": "fp8", "limits": Limits(max_num_seqs=7)}
    device = find_device("H100 SXM")[0]
    assert found == [document(spec_of(name), device, layout, **choice) for layout in layouts]
    assert found[0]["deployment"]["max_num_seqs"] == 7


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3n-e4b", "mixtral-8x7b"])
def test_a_config_that_is_sent(ask, name):
    config = entries()[name]["config"]
    body = {**H100, "config": config, "model": "mine", "engine": "vllm", "layouts": [{}, {"tp": 2}]}
    found = documents(ask(body=body))
    spec = replace(spec_of(name), name="mine", other_params=0)
    device = find_device("H100 SXM")[0]
    layouts = ({}, {"tp": 2})
    assert found == [document(spec, device, layout, engine="vllm") for layout in layouts]


def test_the_served_model_on_its_device(ask, tiny_model):
    (found,) = documents(ask(body={"layouts": [{}]}))
    device = replace(DEVICE, source="measured here")
    expected = document(open_spec(tiny_model), device, {})
    assert found == {**expected, "model": {**expected["model"], "name": "tiny"}}


def test_layouts_that_are_impossible_say_why(ask):
    layouts = [{"tp": 3}, {"ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2}]
    body = {**H100, "model": "llama-3.1-8b", "engine": "vllm", "layouts": layouts}
    answer = ask(body=body)
    heads, divides, experts, found = answer.json()["deployments"]
    assert "32 heads cannot be shared out to tp = 3" in heads["error"]
    assert "does not divide" in divides["error"]
    assert "no experts" in experts["error"]
    assert list(found) == ["document"]
    # Neither can other choices be that contradict the model.
    for choice, part in (
        ({"quantization": "int5"}, "int5"),
        ({"engine": "triton"}, "triton"),
        ({"max_model_len": 10**7}, "10000000"),
    ):
        asked = {**H100, "model": "llama-3.1-8b", "layouts": [{}], **choice}
        (found,) = ask(body=asked).json()["deployments"]
        assert part in found["error"]


def test_what_is_asked_wrongly_is_refused_in_words(ask, tiny_model):
    llama = {**H100, "model": "llama-3.1-8b"}
    config = entries()["llama-3.1-8b"]["config"]
    for body, part in (
        ({**llama, "layouts": []}, "layouts"),
        ({**llama, "layouts": [{}] * 17}, "layouts"),
        ({**llama, "layouts": [{"tp": 0}]}, "tp"),
        ({**llama, "hardware": "abacus", "layouts": [{}]}, "abacus"),
        ({**H100, "model": "llamo", "layouts": [{}]}, "llamo"),
        ({**H100, "model": str(tiny_model), "layouts": [{}]}, "catalogue"),  # no file is opened
        ({**H100, "config": {"model_type": "llamo"}, "layouts": [{}]}, "llamo"),
        ({**H100, "config": {**config, "hidden_size": "many"}, "layouts": [{}]}, "hidden_size"),
    ):
        answer = ask(body=body)
        assert answer.status_code == 400
        assert part in answer.json()["error"]["message"]


def test_documents_tell_no_place_on_this_machine(ask, tiny_model, tmp_path):
    for path in (tiny_model, tmp_path / "secret" / "gone"):
        answer = ask(path, body={"layouts": [{}, {"tp": 5}]})
        assert "/home/me" not in answer.text
        assert str(path.parent) not in answer.text
