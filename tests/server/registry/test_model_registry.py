"""Loading and unloading: what goes, what waits, and what is told to whom."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import READY

from octavo.base.errors import EngineUnavailableError, QueueFullError
from octavo.server.http.errors import HttpError
from octavo.server.registry import registered_model

FAILURE = {"ev": "failed", "kind": "ModelFileError", "message": "tensor 3 is too short"}


def test_requests_for_a_model_wait_for_one_load_of_it(in_registry):
    async def main(setting):
        waiting = [asyncio.create_task(setting.acquire("a")) for _ in range(3)]
        await setting.until(lambda: setting.num_launches("a") == 1)
        assert setting.registry.status_of("a").num_waiting == 3
        assert setting.registry.status_of("a").state == "loading"
        setting.launchers["a"][0].say(READY)
        await asyncio.gather(*waiting)
        status = setting.registry.status_of("a")
        assert (status.num_requests, status.num_waiting, status.state) == (3, 0, "loaded")
        assert (status.max_model_len, setting.num_launches("a")) == (64, 1)

    in_registry(main, "a", "b", held=("a",))


def test_the_least_recently_used_makes_room(in_registry):
    async def main(setting):
        for name in ("a", "b", "a"):
            (await setting.acquire(name))()
        (await setting.acquire("c"))()
        assert setting.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        (await setting.acquire("b"))()
        assert setting.states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert setting.num_launches("b") == 2

    in_registry(main, "a", "b", "c")


def test_what_is_pinned_stays_and_who_cannot_have_room_is_told_why(in_registry, monkeypatch):
    async def main(setting):
        (await setting.acquire("a"))()
        with pytest.raises(HttpError) as caught:
            await setting.acquire("c")
        assert (caught.value.status, caught.value.code) == (503, "model_does_not_fit")
        for words in ("needs 0.00 GiB (weights", "pinned, a (0.00 GiB)", "--model-memory"):
            assert words in caught.value.message
        setting.registry.load("a", pin=False)
        monkeypatch.setattr(registered_model, "FAILURE_SECONDS", 0.0)
        (await setting.acquire("c"))()
        assert setting.states() == {"a": "unloaded", "b": "unloaded", "c": "loaded"}

    in_registry(main, "a", "b", "c", pinned=("a",), budget=199)


def test_a_model_that_is_too_large_is_refused_at_once(in_registry):
    async def main(setting):
        await setting.acquire("a")
        with pytest.raises(HttpError, match="all models together may take 0.00 GiB"):
            await setting.acquire("b")
        assert setting.states() == {"a": "loaded", "b": "unloaded"}

    in_registry(main, "a", "b", sizes={"b": 300})


def test_requests_are_not_interrupted_and_later_ones_wait_their_turn(in_registry):
    """A model that is asked for all the time gives way as soon as what runs there is over."""

    async def main(setting):
        end = await setting.acquire("a")
        other = asyncio.create_task(setting.acquire("b"))
        await setting.until(lambda: setting.registry.status_of("b").num_waiting == 1)
        await asyncio.sleep(0.01)
        later = asyncio.create_task(setting.acquire("a"))
        await setting.until(lambda: setting.registry.status_of("a").num_waiting == 1)
        assert setting.states() == {"a": "loaded", "b": "unloaded"}
        end()
        end_of_other = await other
        assert setting.states() == {"a": "unloaded", "b": "loaded"}
        assert not later.done()
        end_of_other()
        (await later)()
        assert setting.states() == {"a": "loaded", "b": "unloaded"}
        assert setting.num_launches("a") == 2

    in_registry(main, "a", "b", budget=100)


def test_a_client_that_leaves_costs_no_model_its_place(in_registry):
    async def main(setting):
        end = await setting.acquire("a")
        leaving = asyncio.create_task(setting.acquire("b"))
        await setting.until(lambda: setting.registry.status_of("b").num_waiting == 1)
        await asyncio.sleep(0.01)
        behind = asyncio.create_task(setting.acquire("a"))
        await setting.until(lambda: setting.registry.num_waiting == 2)
        leaving.cancel()
        (await behind)()  # while the first still runs
        end()
        assert setting.registry.num_waiting == 0
        assert setting.states() == {"a": "loaded", "b": "unloaded"}
        assert (setting.num_launches("a"), setting.num_launches("b")) == (1, 0)

    in_registry(main, "a", "b", budget=100)


def test_a_client_that_leaves_while_it_is_given_its_model_gives_it_back(in_registry):
    async def main(setting):
        waiting = asyncio.create_task(setting.acquire("a"))
        await setting.until(lambda: setting.num_launches("a") == 1)
        setting.launchers["a"][0].say(READY)
        await setting.until_states(a="loaded")
        waiting.cancel()  # it has been counted, and has not run since
        await asyncio.gather(waiting, return_exceptions=True)
        if not waiting.cancelled():
            waiting.result()()
        assert setting.registry.status_of("a").num_requests == 0

    in_registry(main, "a", held=("a",))


def test_a_model_that_cannot_be_loaded_fails_its_own_requests(in_registry, monkeypatch, tiny_model):
    async def main(setting):
        end = await setting.acquire("a")
        waiting = [asyncio.create_task(setting.acquire("b")) for _ in range(2)]
        await setting.until(lambda: setting.num_launches("b") == 1)
        setting.launchers["b"][0].say(
            {**FAILURE, "message": f"{tiny_model}/x.safetensors: tensor 3 is too short"}
        )
        for each in waiting:
            with pytest.raises(HttpError, match="'b' could not be loaded: .*3 is too short") as e:
                await each
            assert (e.value.status, e.value.code) == (500, "model_load_failed")
            assert str(tiny_model.parent) not in e.value.message
        with pytest.raises(HttpError, match="3 is too short"):  # the same, without an attempt
            await setting.acquire("b")
        assert setting.num_launches("b") == 1
        status = setting.registry.status_of("b")
        assert (status.state, "3 is too short" in status.failure) == ("unloaded", True)
        setting.registry.load("b")  # an operator's word is another attempt
        await setting.until(lambda: setting.num_launches("b") == 2)
        setting.launchers["b"][1].say(READY)
        (await setting.acquire("b"))()
        assert setting.registry.status_of("b").failure is None
        end()

    in_registry(main, "a", "b", held=("b",))


def test_only_so_many_requests_wait(in_registry):
    async def main(setting):
        waiting = [asyncio.create_task(setting.acquire("a")) for _ in range(2)]
        await setting.until(lambda: setting.registry.num_waiting == 2)
        with pytest.raises(QueueFullError, match="2 requests wait for models"):
            await setting.acquire("a")
        await setting.until(lambda: setting.num_launches("a") == 1)
        setting.launchers["a"][0].say(READY)
        await asyncio.gather(*waiting)

    in_registry(main, "a", held=("a",), max_waiting=2)


def test_idle_models_are_unloaded_but_for_pinned_ones(in_registry):
    async def main(setting):
        end = await setting.acquire("a")
        (await setting.acquire("b"))()
        await asyncio.sleep(0.01)
        assert setting.states() == {"a": "loaded", "b": "loaded"}  # a is busy
        end()
        await setting.until_states(a="unloaded", b="loaded")

    in_registry(main, "a", "b", idle=0.0, pinned=("b",))


def test_how_long_a_model_stays_can_be_said_of_it(in_registry):
    async def main(setting):
        end = await setting.acquire("a")
        setting.registry.keep("a", -1)
        end()
        assert setting.registry.status_of("a").unload_after is None
        setting.registry.keep("a", 1000)
        assert 900 < setting.registry.status_of("a").unload_after <= 1000
        setting.registry.keep("a", 0)
        await setting.until_states(a="unloaded")

    in_registry(main, "a", idle=0.0)


def test_a_model_is_unloaded_when_its_requests_are_over_and_loaded_again(in_registry):
    async def main(setting):
        end = await setting.acquire("a")
        setting.registry.unload("a")
        assert setting.states() == {"a": "unloading"}
        later = asyncio.create_task(setting.acquire("a"))
        await setting.until(lambda: setting.registry.num_waiting == 1)
        assert setting.num_launches("a") == 1
        end()
        (await later)()
        assert (setting.states(), setting.num_launches("a")) == ({"a": "loaded"}, 2)

    in_registry(main, "a")


def test_requests_that_go_on_too_long_do_not_keep_a_model(in_registry):
    async def main(setting):
        await setting.acquire("a")
        setting.registry.unload("a")
        await setting.until_states(a="unloaded")

    in_registry(main, "a", drain_timeout=0.0)


def test_an_engine_that_is_given_up_is_tried_again_by_the_next_request(in_registry, monkeypatch):
    monkeypatch.setattr("octavo.server.engine.supervisor._RESTART_PAUSES", (0.0,) * 5)
    monkeypatch.setattr(registered_model, "FAILURE_SECONDS", 0.0)

    async def main(setting):
        (await setting.acquire("a"))()
        for number in range(1, 6):
            await setting.until(lambda: setting.num_launches("a") == number)  # noqa: B023
            setting.launchers["a"][0].engines[-1].kill()
        await setting.until_states(a="unloaded")
        assert "dies each time" in setting.registry.status_of("a").failure
        (await setting.acquire("a"))()
        assert setting.states() == {"a": "loaded"}

    in_registry(main, "a")


def test_models_that_were_named_are_loaded_at_the_start_as_far_as_they_fit(in_registry):
    async def main(setting):
        assert setting.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        (await setting.acquire("c"))()
        assert setting.states()["c"] == "loaded"

    in_registry(main, "a", "b", "c", at_start=True)


def test_the_end_tells_those_who_wait_and_leaves_no_engine(in_registry):
    async def main(setting):
        await setting.acquire("a")
        waiting = asyncio.create_task(setting.acquire("b"))
        await setting.until(lambda: setting.num_launches("b") == 1)
        await setting.registry.stop()
        with pytest.raises(HttpError, match="stopping"):
            await waiting
        with pytest.raises(EngineUnavailableError, match="stopping"):
            await setting.acquire("a")
        assert all(engine.is_over for engine in setting.engines())

    in_registry(main, "a", "b", held=("b",))


def test_names_are_those_of_entries_and_as_ollama_writes_them(in_registry):
    async def main(setting):
        assert setting.registry.named("tiny").name == "tiny"
        assert setting.registry.named("tiny:latest").name == "tiny"
        with pytest.raises(HttpError, match="did you mean tiny?") as caught:
            setting.registry.named("tinny")
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        with pytest.raises(HttpError, match="model: is required.*tiny, other"):
            setting.registry.named(None)

    in_registry(main, "tiny", "other")
