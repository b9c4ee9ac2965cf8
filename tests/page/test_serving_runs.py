"""The simulator's runs: what more load, and other settings, do to them; and recorded ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import spec_of
from octavo.page import site
from octavo.page.serving_runs import (
    BOUNDS,
    CHOICES,
    RECORDED,
    SHARES,
    ServingSettings,
    recorded_settings,
    serving_runs,
)


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text())


def shares_in_time(found, seconds=0.5):
    """Of the requests of each run, how many have a token so soon."""
    return [
        sum(first <= seconds for first, _ in run["requests"]) / len(run["requests"])
        for run in found["runs"]
    ]


def test_a_recorded_run_is_what_comes_out_now(recorded):
    """If not: python -m octavo.page.serving_runs --record"""
    found = json.loads(json.dumps(serving_runs(ServingSettings(), SHARES[:4])))
    assert found["runs"] == recorded[0]["runs"][:4]
    assert found["settings"] == recorded[0]["settings"]


def test_the_usual_settings_are_recorded_and_those_beside_them(recorded):
    assert [ServingSettings(**found["settings"]) for found in recorded] == recorded_settings()
    for found in recorded:
        assert [run["share"] for run in found["runs"]] == list(SHARES)
        for run in found["runs"]:
            assert len(run["requests"]) == run["num_requests"] - run["num_requests"] // 2
            assert all(first > 0 and (next_ or 1) > 0 for first, next_ in run["requests"])
            assert all(0 <= held <= 1 for *_, held in run["series"])


def test_there_is_a_knee_and_settings_move_it(recorded):
    known = {json.dumps(found["settings"]): shares_in_time(found) for found in recorded}

    def knee(**changes):
        shares = known[json.dumps(vars_of(changes))]
        return max(
            (at for at, share in zip(SHARES, shares, strict=True) if share >= 0.9), default=0
        )

    def vars_of(changes):
        return {**recorded[0]["settings"], **changes}

    usual = knee()
    assert 0.75 <= usual <= 1.5  # where one replica is as busy as it can be
    assert knee(replicas=2) >= 2 * usual
    assert knee(max_num_seqs=128) > usual > knee(max_num_seqs=8)
    assert knee(prefix_caching=False) < usual
    assert knee(batching="static") < usual
    hits = [found["runs"][3]["prefix_hit_rate"] or 0 for found in recorded]
    without = [found["settings"]["prefix_caching"] for found in recorded].index(False)
    assert hits[0] > 0.4 and hits[without] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "/etc/passwd"},
        {"model": "no-such-model"},
        {"hardware": "/etc/passwd"},
        {"replicas": 5},
        {"max_num_seqs": 0},
        {"batching": "dynamic"},
    ],
)
def test_only_what_is_known_is_simulated(changes):
    with pytest.raises(ConfigError):
        serving_runs(ServingSettings(**changes), ())


def test_a_model_of_ones_own_is_simulated():
    spec = spec_of("llama-3.2-1b")
    settings = ServingSettings(model="mine", max_num_seqs=20)
    found = serving_runs(settings, (1.0,), spec)
    named = serving_runs(replace(settings, model="llama-3.2-1b"), (1.0,))
    assert found["runs"] == named["runs"]
    assert found["settings"]["model"] == "mine"


def test_the_page_offers_the_same_choices():
    source = (site.STATIC / "pictures" / "serving_runs.js").read_text()
    written = re.search(r"export const CHOICES = (\{.*?\n\});", source, re.S)
    assert written is not None
    as_json = re.sub(r"(\w+):", r'"\1":', written.group(1)).replace(",\n}", "\n}")
    assert json.loads(as_json) == {name: list(choices) for name, choices in CHOICES.items()}
    bounds = re.search(r"export const BOUNDS = (\{.*?\n\});", source, re.S)
    assert bounds is not None
    for name, (least, most) in BOUNDS.items():
        assert f"{name}: [{least}, {most}]," in bounds.group(1)
    shares = re.search(r"export const SHARES = (\[.*?\]);", source)
    assert shares is not None and json.loads(shares.group(1)) == list(SHARES)


def test_a_context_that_is_too_short_for_the_load_is_an_error():
    """And no failure of the program: a config may say what it likes."""
    spec = replace(spec_of("llama-3.2-1b"), max_position=2048)
    with pytest.raises(ConfigError, match="a context of 2048 tokens is too short for"):
        serving_runs(ServingSettings(), (1.0,), spec)
    with pytest.raises(ConfigError, match="a context of 100 tokens is too short for"):
        serving_runs(ServingSettings(), (1.0,), replace(spec, max_position=100))
