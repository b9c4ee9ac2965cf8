"""Adapters over HTTP: from the start, and loaded by an operator; the model field picks them."""

from __future__ import annotations

import json
import os
import signal

import pytest
from made_adapters import merged_by_hand, write_adapter

from octavo import LLM, SamplingParams

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory):
    """Three adapters of a model, and what it answers with each: merged into it by hand."""
    folder = tmp_path_factory.mktemp("lora")
    adapters = {
        name: write_adapter(folder / name, tiny_model, seed=seed, rank=4)
        for seed, name in enumerate(("sql", "poems", "late"), 1)
    }
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = {}
    for name in ("", *adapters):
        model = tiny_model
        if name:
            model = merged_by_hand(folder / f"merged {name}", tiny_model, adapters[name])
        with LLM(str(model), num_blocks=16, max_model_len=64, threads=1) as llm:
            (output,) = llm.generate(PROMPT, params)
        answers[name] = output.outputs[0].text
    assert len(set(answers.values())) == 4
    return adapters, answers


@pytest.fixture(scope="module")
def server(live_server, tiny_model, made):
    adapters, _ = made
    flags = ["--lora", *(f"{name}={adapters[name]}" for name in ("sql", "poems"))]
    with live_server(tiny_model, *flags, "--served-model-name", "base") as server:
        yield server


def ask(server, model, **more):
    body = {
        "model": model,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        **more,
    }
    return server.fetch("/v1/completions", body)


def test_the_model_field_picks_the_adapter(server, made):
    _, answers = made
    for model, name in (("base", ""), ("sql", "sql"), ("poems", "poems"), ("sql", "sql")):
        answer = ask(server, model).json()
        assert answer["choices"][0]["text"] == answers[name]
        assert answer["model"] == model
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}
    chats = {
        model: server.fetch("/v1/chat/completions", {**body, "model": model}).json()["choices"]
        for model in ("base", "sql", "poems")
    }
    assert len({choice[0]["message"]["content"] for choice in chats.values()}) == 3


def test_many_at_once_are_answered_as_each_alone(server, made):
    _, answers = made

    async def all_at_once():
        bodies = [
            {"model": name or "base", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
            for name in ("", "sql", "poems") * 4
        ]
        more = {"stream": True, "ignore_eos": True}
        return [await server.stream({**body, **more}) for body in bodies]

    async def texts():
        streams = [await stream.rest() for stream in await all_at_once()]
        return ["".join(choice["text"] for choice in stream.choices) for stream in streams]

    found = server.run(texts())
    assert found == [answers[name] for name in ("", "sql", "poems") * 4]


def test_prefixes_are_not_shared_between_adapters(server):
    prompt = "A prompt that is long enough for some blocks of the prefix cache, and more. " * 2
    cached = []
    for model in ("sql", "sql", "base", "poems"):
        answer = ask(server, model, prompt=prompt, max_tokens=1).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == cached[3] == 0 < cached[1]


def test_models_lists_adapters_with_their_parent(server):
    models = {each["id"]: each for each in server.fetch("/v1/models").json()["data"]}
    assert list(models)[:3] == ["base", "sql", "poems"]
    assert models["base"]["parent"] is None
    assert models["sql"]["parent"] == "base"
    assert server.fetch("/v1/models/poems").json()["id"] == "poems"


def test_adapters_are_loaded_and_unloaded(server, made):
    adapters, answers = made
    assert ask(server, "late").status == 404
    body = {"lora_name": "late", "lora_path": str(adapters["late"])}
    answer = server.fetch("/v1/load_lora_adapter", body)
    assert (answer.status, b"added successfully" in answer.body) == (200, True)
    assert ask(server, "late").json()["choices"][0]["text"] == answers["late"]
    again = server.fetch("/v1/load_lora_adapter", body)
    assert again.status == 400 and "is loaded already" in again.error["message"]
    in_place = {**body, "lora_path": str(adapters["sql"]), "load_inplace": True}
    assert server.fetch("/v1/load_lora_adapter", in_place).status == 200
    assert ask(server, "late").json()["choices"][0]["text"] == answers["sql"]
    assert server.fetch("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 200
    assert ask(server, "late").status == 404
    assert server.fetch("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 404


def test_what_is_wrong_with_an_adapter_is_said(server, made, tmp_path, tiny_model):
    adapters, _ = made
    wrong = write_adapter(tmp_path / "wrong", tiny_model, rank=4)
    config = json.loads((wrong / "adapter_config.json").read_text())
    for change, said in (({"use_dora": True}, "use_dora"), ({"r": 5}, "the rank is 4")):
        (wrong / "adapter_config.json").write_text(json.dumps({**config, **change}))
        body = {"lora_name": "wrong", "lora_path": str(wrong)}
        answer = server.fetch("/v1/load_lora_adapter", body)
        assert answer.status == 400 and said in answer.error["message"]
    for body, said in (
        ({"lora_name": "base", "lora_path": str(adapters["sql"])}, "name of the model"),
        ({"lora_name": "x", "lora_path": str(tmp_path / "nowhere")}, "no such folder"),
        ({"lora_name": "x"}, "lora_path"),
    ):
        answer = server.fetch("/v1/load_lora_adapter", body)
        assert answer.status == 400 and said in answer.error["message"]
    assert ask(server, "base").status == 200


def test_a_start_with_a_wrong_adapter_ends_and_says_why(live_server, tiny_model, tmp_path):
    wrong = write_adapter(tmp_path / "wrong", tiny_model, rank=4)
    config = json.loads((wrong / "adapter_config.json").read_text())
    (wrong / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with live_server(tiny_model, "--lora", f"wrong={wrong}", waits=False) as server:
        assert server.wait(120) == 1
        server._is_ready.wait(60)
    assert any("the rank is 4" in line for line in server.log)


def test_an_engine_that_takes_the_place_of_another_has_the_adapters(server, made):
    _, answers = made
    before = server.load()["num_restarts"]
    os.kill(server.engine_pid, signal.SIGKILL)
    server.wait_for_load(lambda load: load["num_restarts"] > before, 60)
    assert ask(server, "poems").json()["choices"][0]["text"] == answers["poems"]
