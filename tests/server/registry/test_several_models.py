"""Several models over HTTP: which one answers, and what clients see of the others."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from scripted_engine import READY

from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import GenerationRequest
from octavo.server.http.tenants import Tenants
from octavo.server.registry.several_models import SeveralModels
from octavo.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]


def asking(model: str | None = None, **fields) -> dict:
    named = {} if model is None else {"model": model}
    return {**named, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, **fields}


@pytest.fixture
def over_http(in_registry):
    """Runs ``main(client, setting)`` beside the app of a registry whose engines compute."""

    def run(main, *names, **options):
        async def with_client(setting):
            app = await SeveralModels(setting.registry).create_app(Tenants(ServerSettings()))
            setting.app = app
            transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
            base = "http://127.0.0.1"
            async with httpx.AsyncClient(transport=transport, base_url=base) as client:
                return await main(client, setting)

        return in_registry(with_client, *names, **{"threads": True, **options})

    return run


async def post(client, path=COMPLETIONS, **body) -> httpx.Response:
    return await client.post(path, json=body)


def test_the_model_field_picks_and_the_first_that_was_named_is_meant_by_none(over_http):
    async def main(client, setting):
        for asked, answers in (("b", "b"), ("a", "a"), (None, "a")):
            answer = await post(client, **asking(asked))
            assert (answer.status_code, answer.json()["model"]) == (200, answers), answer.text
        tokens = await post(client, "/tokenize", model="b", prompt="hello")
        assert tokens.json()["count"] == 5
        stream = await post(client, **asking("b", stream=True))
        assert stream.text.endswith("data: [DONE]\n\n")
        assert all(each.num_requests == 0 for each in setting.registry.list())

    over_http(main, "a", "b", at_start=True)


def test_an_unknown_model_is_a_404_with_what_was_meant_in_every_shape(over_http):
    async def main(client, setting):
        for path, body in (
            (COMPLETIONS, asking("model-c")),
            (
                "/v1/chat/completions",
                {"model": "model-c", "messages": [{"role": "user", "content": "x"}]},
            ),
            ("/completion", {"model": "model-c", "prompt": "x"}),
            ("/generate", {"model": "model-c", "prompt": "x"}),
            ("/tokenize", {"model": "model-c", "prompt": "x"}),
        ):
            answer = await post(client, path, **body)
            assert answer.status_code == 404, (path, answer.text)
            assert "did you mean model-" in answer.json()["error"]["message"]
        assert (await client.get("/v1/models/model-c")).status_code == 404
        assert setting.states() == {"model-a": "unloaded", "model-b": "unloaded"}

    over_http(main, "model-a", "model-b")


def test_ollamas_clients_see_all_models_and_say_how_long_one_stays(over_http):
    async def main(client, setting):
        async def names(path):
            return [each["name"] for each in (await client.get(path)).json()["models"]]

        assert (await names("/api/tags"), await names("/api/ps")) == (["a", "b"], [])
        prompt = {"prompt": "x", "raw": True, "stream": False, "options": {"num_predict": 2}}
        answer = await post(client, "/api/generate", model="b:latest", keep_alive="5m", **prompt)
        assert answer.status_code == 200, answer.text
        assert (await names("/api/tags"), await names("/api/ps")) == (["a", "b"], ["b"])
        (status,) = (each for each in setting.registry.list() if each.names == ("b",))
        assert 200 < status.unload_after <= 300
        unloading = await post(client, "/api/generate", model="b", keep_alive=0, stream=False)
        assert unloading.json()["done_reason"] == "unload"
        await setting.until_states(b="unloaded")
        wrong = await post(client, "/api/generate", model="b", keep_alive="soon", **prompt)
        assert wrong.status_code == 400 and "keep_alive" in wrong.json()["error"]

    over_http(main, "a", "b")


def test_a_body_that_is_wrong_or_names_no_model_loads_nothing(over_http):
    async def main(client, setting):
        answer = await post(client, **asking())
        assert answer.status_code == 400
        assert "model: is required" in answer.json()["error"]["message"]
        for content in (b"{", b"[]", b'{"model": 3, "prompt": "x"}', b"", b"\xff"):
            answer = await client.post(COMPLETIONS, content=content)
            assert answer.status_code == 400, answer.text
        assert setting.states() == {"a": "unloaded", "b": "unloaded"}

    over_http(main, "a", "b")


def test_all_models_are_listed_with_what_they_are(over_http):
    async def main(client, setting):
        await post(client, **asking("b"))
        listed = (await client.get("/models")).json()
        assert listed["model_memory"] == 10**9
        first, second = listed["data"]
        assert (first["id"], first["status"]["value"], first["pinned"]) == ("a", "unloaded", True)
        assert second["status"] == {"value": "loaded", "failed": False, "error": None}
        assert (second["max_model_len"], first["max_model_len"]) == (64, None)
        assert second["memory_bytes"]["total"] > 0
        assert (await client.get("/v1/models/b")).json() == second
        health = await client.get("/health")
        assert health.status_code == 200
        assert health.json()["models"] == {"a": "unloaded", "b": "loaded"}

    over_http(main, "a", "b", pinned=("a",), budget=10**9)


def test_an_operator_loads_pins_and_unloads(over_http):
    async def main(client, setting):
        assert (await post(client, "/models/load", model="b")).json() == {"success": True}
        await setting.until_states(b="loaded", a="unloaded")
        again = await post(client, "/models/load", model="b")
        assert (again.status_code, "already" in again.text) == (400, True)
        await post(client, "/models/load", model="b", pin=True)
        assert setting.registry.status_of("b").is_pinned
        assert (await post(client, "/v1/models/unload", model="b")).json() == {"success": True}
        await setting.until_states(b="unloaded")
        for path, model, status in (
            ("/models/unload", "b", 400),
            ("/models/load", "c", 404),
            ("/models/unload", "c", 404),
        ):
            assert (await post(client, path, model=model)).status_code == status
        refused = await post(client, "/models/load", model="a", extra_args=["--x"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "extra_args")

    over_http(main, "a", "b")


def test_what_only_looks_loads_nothing(over_http):
    async def main(client, setting):
        for path in ("/props?model=a", "/load", "/info", "/octavo/deployment"):
            answer = await client.get(path)
            assert answer.status_code == 503, (path, answer.text)
            assert "is unloaded: a request for an answer loads it" in answer.text
        for path in ("/", "/engine", "/version", "/ready", "/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/props?model=c")).status_code == 404
        await post(client, **asking("b"))
        assert (await client.get("/props")).json()["model_alias"] == "b"  # the one there is
        assert (await client.get("/props?model=a")).status_code == 503
        assert (await client.get("/load")).json()["num_restarts"] == 0
        assert setting.states() == {"a": "unloaded", "b": "loaded"}

    over_http(main, "a", "b")


def test_metrics_have_the_name_of_the_model_through_loads(over_http):
    async def main(client, setting):
        for name in ("a", "b", "a"):  # one at a time
            assert (await post(client, **asking(name))).status_code == 200
        await post(client, **asking("c"))
        text = (await client.get("/metrics?names=octavo")).text
        assert 'octavo:generation_tokens_total{engine="0",model_name="a"} 8.0' in text
        assert 'octavo:generation_tokens_total{engine="0",model_name="b"} 4.0' in text
        ready = 'octavo:engine_state{engine="0",model_name="%s",state="ready"} %s'
        assert ready % ("a", "1.0") in text
        assert ready % ("b", "0.0") in text
        counted = 'http_requests_total{engine="0",method="POST",model_name="%s",route='
        assert counted % "a" in text
        assert counted % "" in text  # of the model that there is not

    over_http(main, "a", "b", budget=100)


def test_others_stream_while_a_model_loads(over_http):
    """Every token of a stream comes while another model, for which requests wait, is loading."""

    async def main(client, setting):
        assert (await post(client, **asking("a"))).status_code == 200
        slow = asyncio.create_task(post(client, **asking("b")))
        await setting.until_states(b="loading")
        for _ in range(4):
            streamed = await post(client, **asking("a", stream=True, max_tokens=16))
            events = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
            assert len(events) >= 16
        assert setting.states() == {"a": "loaded", "b": "loading"}
        assert not slow.done()
        setting.launchers["b"][0].let_go.set()
        assert (await slow).json()["model"] == "b"

    over_http(main, "a", "b", held=("b",))


def test_a_client_that_leaves_while_its_model_loads_leaves_nothing(over_http):
    async def main(client, setting):
        gone = asyncio.Event()
        sent = []
        body = json.dumps(asking("b")).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(body))],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "http_version": "1.1",
        }
        serving = asyncio.create_task(setting.app(scope, receive, send))
        await setting.until_states(b="loading")
        gone.set()
        await serving
        assert (sent, setting.registry.num_waiting) == ([], 0)
        setting.launchers["b"][0].let_go.set()
        await setting.until_states(b="loaded")  # it was all but there; it stays, idle
        assert setting.registry.status_of("b").num_requests == 0
        assert "client_disconnects" in (await client.get("/metrics")).text

    over_http(main, "a", "b", held=("b",))


def test_an_error_of_loading_is_told_over_http(over_http):
    async def main(client, setting):
        waiting = asyncio.create_task(post(client, **asking("b")))
        await setting.until(lambda: setting.num_launches("b") == 1)
        setting.launchers["b"][0].say({"ev": "failed", "kind": "EngineError", "message": "no room"})
        answer = await waiting
        assert answer.status_code == 500
        assert "'b' could not be loaded: no room" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        listed = (await client.get("/v1/models/b")).json()
        assert listed["status"]["failed"]
        assert (await client.get("/health")).status_code == 200
        waiting = asyncio.create_task(post(client, **asking("a")))
        await setting.until(lambda: setting.num_launches("a") == 1)
        setting.launchers["a"][0].say(READY)
        await setting.until_states(a="loaded")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    over_http(main, "a", "b", held=("a", "b"), threads=False)


def test_what_is_made_in_the_background_keeps_its_model(over_http):
    """A request may end before the work that it has begun."""

    async def main(client, setting):
        async with setting.registry.use("a") as context:
            request = GenerationRequest("r1", [1, 2, 3], SamplingParams(max_tokens=40), 0.0)
            generation = context.submit(request)
        waiting = asyncio.create_task(post(client, **asking("b")))
        completions = await generation.collect()
        assert len(completions[0].token_ids) == 40
        assert (await waiting).json()["model"] == "b"
        assert setting.states() == {"a": "unloaded", "b": "loaded"}

    over_http(main, "a", "b", budget=100)


def test_a_request_waits_no_longer_than_requests_may(over_http):
    async def main(client, setting):
        answer = await post(client, **asking("b"))
        assert answer.status_code == 504
        assert "while b was loading" in answer.json()["error"]["message"]
        await setting.until(lambda: setting.registry.num_waiting == 0)
        assert setting.states() == {"a": "unloaded", "b": "loading"}

    over_http(main, "a", "b", held=("b",), request_timeout=0.01)
