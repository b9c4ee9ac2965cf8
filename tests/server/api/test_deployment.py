from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.planner.page_export import hardware_json, model_json
from octavo.server.api.octavo import deployment

DEVICE = replace(find_device("epyc-genoa")[0], is_measured=True, source="kept in /home/me")


@pytest.fixture
def ask(fake_engine, create_service, send, tiny_model, monkeypatch):
    """The answer about a server of these files, on a device that is known or not."""

    def ask(path=tiny_model, device=DEVICE):
        def find(kind):
            if device is None:
                raise ConfigError("its ceilings have not been measured yet")
            return device

        monkeypatch.setattr(deployment, "device_of_engine", find)
        service = replace(create_service(fake_engine), model_path=path)
        return send(deployment.create_router(service), "GET", "/octavo/deployment")

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
