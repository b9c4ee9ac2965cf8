"""Adapters in Python: `LLM` and `AsyncLLM` with `LoRARequest`."""

from __future__ import annotations

import asyncio
import json

import pytest
from made_adapters import write_adapter

from octavo import LLM, AsyncLLM, LoRARequest, SamplingParams
from octavo.base.errors import ConfigError, InvalidRequestError, ModelError, ModelFileError

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SMALL = {"num_blocks": 32, "max_model_len": 64, "threads": 1}
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def loras(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    return [
        LoRARequest(f"a{i}", i, str(write_adapter(folder / f"{i}", tiny_model, seed=i, rank=4)))
        for i in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), enable_lora=True, max_loras=4, **SMALL) as llm:
        yield llm


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_one_for_all_prompts_or_one_for_each(llm, loras):
    alone = [texts(llm.generate(PROMPT, GREEDY, lora_request=each))[0] for each in [None, *loras]]
    assert len(set(alone)) == 4
    outputs = llm.generate([PROMPT] * 4, GREEDY, lora_request=[None, *loras])
    assert texts(outputs) == alone
    assert [output.lora_request for output in outputs] == [None, *loras]
    assert outputs[1].outputs[0].lora_request is loras[0]
    assert texts(llm.generate([PROMPT] * 2, GREEDY, lora_request=loras[0])) == [alone[1]] * 2
    assert texts(llm.generate(PROMPT, GREEDY)) == alone[:1]


def test_samples_streams_and_chats_have_it_too(llm, loras):
    (expected,) = texts(llm.generate(PROMPT, GREEDY, lora_request=loras[0]))
    params = SamplingParams(n=3, seed=5, max_tokens=6)
    (several,) = llm.generate(PROMPT, params, lora_request=loras[0])
    (again,) = llm.generate(PROMPT, params, lora_request=loras[0])
    assert [one.text for one in several.outputs] == [one.text for one in again.outputs]
    streamed = llm.stream(PROMPT, GREEDY, lora_request=loras[0])
    assert "".join(chunk.text for chunk in streamed) == expected
    chat = [{"role": "user", "content": "Hello"}]
    (with_it,) = texts(llm.chat(chat, GREEDY, lora_request=loras[0]))
    assert with_it != texts(llm.chat(chat, GREEDY))[0]
    chunks = llm.stream_chat(chat, GREEDY, lora_request=loras[0])
    assert "".join(chunk.text for chunk in chunks) == with_it


def test_the_async_engine_has_them(tiny_model, loras, llm):
    expected = texts(llm.generate([PROMPT] * 2, GREEDY, lora_request=[loras[0], None]))

    async def last(engine, number, lora):
        async for output in engine.generate(PROMPT, GREEDY, f"{number}", lora_request=lora):
            found = output
        return found.outputs[0].text

    async def both():
        engine = AsyncLLM(str(tiny_model), **SMALL)
        try:
            return await asyncio.gather(last(engine, 1, loras[0]), last(engine, 2, None))
        finally:
            engine.shutdown()

    assert asyncio.run(both()) == expected


def test_an_adapter_that_is_wrong_is_an_error_of_its_call_alone(llm, loras, tiny_model, tmp_path):
    other = write_adapter(tmp_path / "other", tiny_model, names=("q_proj",))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with pytest.raises(ModelFileError, match="the rank is 4"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("other", 9, str(other)))
    for wrong in ("a1", 1, {"lora_name": "a1"}, [loras[0]] * 2):
        with pytest.raises(InvalidRequestError, match="lora_request"):
            llm.generate(PROMPT, GREEDY, lora_request=wrong)
    for fields in (("", 1, "x"), ("a", 0, "x"), ("a", "1", "x"), ("a", 1, "")):
        with pytest.raises(InvalidRequestError, match="lora_"):
            LoRARequest(*fields)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].finish_reason == "length"


def test_files_that_change_while_an_adapter_is_away_fail_its_requests_alone(tiny_model, tmp_path):
    first = write_adapter(tmp_path / "first", tiny_model, seed=1)
    second = write_adapter(tmp_path / "second", tiny_model, seed=2)
    requests = [LoRARequest("first", 1, str(first)), LoRARequest("second", 2, str(second))]
    with LLM(str(tiny_model), lora_memory="60KB", **SMALL) as llm:
        before = texts(llm.generate([PROMPT] * 2, GREEDY, lora_request=requests))
        llm.generate(PROMPT, GREEDY, lora_request=requests[1])  # for which the first one goes
        assert llm._loaded.adapters.pool.num_dropped > 0
        write_adapter(first, tiny_model, seed=3)
        outputs = llm.generate([PROMPT] * 2, GREEDY, lora_request=requests)
    assert outputs[0].outputs[0].finish_reason == "error" and "were changed" in outputs[0].error
    assert outputs[1].outputs[0].text == before[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kernels": "fused"}, "fused kernels of a GPU"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_where_there_are_none_the_start_ends_with_the_reason(settings, said, tiny_model, loras):
    with pytest.raises(ConfigError, match=said):
        LLM(str(tiny_model), enable_lora=True, **{**SMALL, **settings})
    if "kernels" in settings:  # else processes are started
        llm = LLM(str(tiny_model), **SMALL, **settings)
        with llm, pytest.raises(InvalidRequestError, match=said):
            llm.generate(PROMPT, GREEDY, lora_request=loras[0])


def test_settings_of_adapters(tiny_model, loras, tmp_path):
    path = loras[0].lora_path
    for settings, error, said in (
        ({"lora": [path]}, ConfigError, "NAME=PATH"),
        ({"lora": [f"a={path}", f"a={path}"]}, ConfigError, "twice"),
        ({"lora": [f"a={path}"], "enable_lora": False}, ConfigError, "enable_lora"),
        ({"max_lora_rank": 257}, ConfigError, "max_lora_rank"),
        ({"max_loras": 0}, ConfigError, "max_loras"),
        ({"lora": [f"a={path}"], "max_lora_rank": 3}, ModelError, "max_lora_rank"),
        ({"lora": [f"a={path}"], "lora_memory": "1KB"}, ModelError, "lora_memory"),
        ({"lora": [f"a={tmp_path}"]}, ModelError, "adapter_config.json"),
        (
            {"lora_dtype": "bfloat16", "kernels": "reference", "enable_lora": True},
            ConfigError,
            "lora_dtype",
        ),
    ):
        with pytest.raises(error, match=said):
            LLM(str(tiny_model), **SMALL, **settings)
    llm = LLM(str(tiny_model), enable_lora=False, **SMALL)
    with llm, pytest.raises(InvalidRequestError, match="enable_lora"):
        llm.generate(PROMPT, GREEDY, lora_request=loras[0])
