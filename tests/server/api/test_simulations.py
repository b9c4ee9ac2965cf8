"""``POST /octavo/simulate``: a process of its own runs it, and what is wrong is said."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.errors import DeadlineError, QueueFullError
from octavo.page.serving_runs import CHOICES, SHARES
from octavo.server.api.octavo import simulations
from octavo.server.http.errors import HttpError


@pytest.fixture
def post(fake_engine, create_service, send):
    def post(body):
        router = simulations.create_router(create_service(fake_engine))
        return send(router, "POST", "/octavo/simulate", json=body)

    return post


@pytest.mark.slow
def test_a_load_is_simulated(post):
    asked = {"model": "llama-3.1-8b", "hardware": "H100 SXM", "max_num_seqs": 128}
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
        ({"replicas": 1000}, "replicas"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(post, changes, part):
    answer = post({"model": "llama-3.1-8b", "hardware": "H100 SXM", **changes})
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_it_knows_the_choices_of_the_simulator():
    offered = simulations.SimulationRequest.model_json_schema()["properties"]
    for name, choices in CHOICES.items():
        if choices != (True, False):
            assert set(offered[name]["enum"]) == set(choices)


def test_it_takes_no_longer_than_it_may():
    async def run():
        with pytest.raises(DeadlineError):
            await simulations.Simulator(max_seconds=0.01).answer("{}")

    asyncio.run(run())


def test_no_more_wait_than_there_is_time_for():
    async def run():
        simulator = simulations.Simulator(max_waiting=0)
        first = asyncio.create_task(simulator.answer(json.dumps({"model": "none"})))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await simulator.answer("{}")
        with pytest.raises(HttpError, match="catalogue"):
            await first

    asyncio.run(run())
