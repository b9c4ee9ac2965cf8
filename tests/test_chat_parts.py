"""`LLM.chat` with tools and thoughts, of a model with random weights: what it is made to write."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.base.errors import InvalidRequestError
from octavo.core.sampling_params import RequestOutputKind

HI = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{# <tool_call> #}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "<|assistant|>{% if thinks %}<think>{# </think> #}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "level": {"enum": [1, 2]}},
            "required": ["on", "level"],
        },
    },
}
ASKED = {"chat_template": TEMPLATE, "tools": [TOOL], "tool_choice": "required"}
ONE = {**ASKED, "parallel_tool_calls": False}


def params(seed=0, **changes):
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 200, **changes})


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), block_size=16) as llm:
        yield llm


def check_call(call):
    arguments = json.loads(call.arguments)
    assert call.id and call.name == "set"
    assert arguments["on"] in (True, False) and arguments["level"] in (1, 2)


@pytest.mark.parametrize("seed", range(3))
def test_calls_that_are_required_are_made_and_valid(llm, seed):
    (output,) = llm.chat(HI, params(seed, n=2), **ONE)
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        (call,) = completion.tool_calls
        check_call(call)
        assert completion.content is None and "<tool_call>" in completion.text


def test_pieces_of_a_stream_are_the_whole(llm):
    (whole,) = llm.chat(HI, params(5), **ONE)
    (expected,) = whole.outputs[0].tool_calls
    for kind in RequestOutputKind:
        chunks = list(llm.stream_chat(HI, params(5, output_kind=kind), **ONE))
        pieces = [piece for chunk in chunks for piece in chunk.tool_calls]
        assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
        assert (pieces[0].name, pieces[0].index) == ("set", 0) and pieces[0].id
        assert "".join(piece.arguments for piece in pieces) == expected.arguments
        if kind is RequestOutputKind.CUMULATIVE:
            found = [chunk.output.outputs[0].tool_calls for chunk in chunks]
            texts = [calls[0].arguments for calls in found if calls]
            # Outputs that are put together late are as they were at their chunk.
            assert texts == sorted(texts, key=len) and texts[-1] == expected.arguments


def test_asyncio_gives_the_same(tiny_model, llm):
    (whole,) = llm.chat(HI, params(5), **ONE)
    (expected,) = whole.outputs[0].tool_calls

    async def run():
        engine = AsyncLLM(str(tiny_model), block_size=16)
        try:
            found = [
                [
                    output.outputs[0].tool_calls
                    async for output in engine.chat(
                        HI, params(5, output_kind=kind), kind.name, **ONE
                    )
                    if output.outputs
                ]
                for kind in RequestOutputKind
            ]
        finally:
            engine.shutdown()
        return dict(zip(RequestOutputKind, found, strict=True))

    found = asyncio.run(run())
    assert found[RequestOutputKind.CUMULATIVE][-1][0].arguments == expected.arguments
    assert found[RequestOutputKind.FINAL_ONLY][0][0].arguments == expected.arguments
    pieces = [piece for calls in found[RequestOutputKind.DELTA] for piece in calls]
    assert "".join(piece.arguments for piece in pieces) == expected.arguments


def test_what_is_no_chat_has_no_parts(llm):
    (output,) = llm.generate("Hi", params(max_tokens=4))
    completion = output.outputs[0]
    assert (completion.content, completion.reasoning, completion.tool_calls) == (None, None, [])
    (output,) = llm.chat(HI, params(max_tokens=4))
    assert output.outputs[0].content == output.outputs[0].text


THINKS = {"chat_template": TEMPLATE, "chat_template_kwargs": {"thinks": True}}


@pytest.fixture(scope="module")
def thinker(tiny_model, tmp_path_factory):
    """The same weights, with a template that knows thoughts."""
    folder = tmp_path_factory.mktemp("thinker")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(str(folder), block_size=16) as llm:
        yield llm


@pytest.mark.parametrize("budget", [0, 1, 20])
def test_a_thought_ends_when_its_budget_is_spent(thinker, budget):
    asked = {"chat_template_kwargs": {"thinks": True}}
    free = params(3, max_tokens=60, ignore_eos=True)
    (output,) = thinker.chat(HI, free, **asked)
    assert output.outputs[0].content is None  # random weights do not end it
    limited = free.with_changes(thinking_token_budget=budget)
    (output,) = thinker.chat(HI, limited, **asked)
    completion = output.outputs[0]
    ids = completion.token_ids
    end = thinker.get_tokenizer().encode("</think>", add_special_tokens=False)
    (at,) = [i for i in range(len(ids)) if ids[i : i + len(end)] == end]
    assert budget <= at <= budget + 4  # a character is not cut
    assert completion.content and len(ids) == 60


def test_a_budget_goes_by_the_template_of_the_request(llm):
    """This model's own template knows no thoughts."""
    limited = params(3, max_tokens=60, ignore_eos=True, thinking_token_budget=8)
    (output,) = llm.chat(HI, limited, **THINKS)
    completion = output.outputs[0]
    end = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
    ids = completion.token_ids
    assert any(ids[at : at + len(end)] == end for at in range(8, 13))
    assert completion.reasoning and completion.content


def test_a_budget_and_a_grammar_go_together(thinker):
    limited = params(1, thinking_token_budget=10, max_tokens=200)
    asked = {**ONE, "chat_template": None, "chat_template_kwargs": {"thinks": True}}
    (output,) = thinker.chat(HI, limited, **asked)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and completion.reasoning
    (call,) = completion.tool_calls
    check_call(call)


def test_a_constraint_begins_after_the_thought(thinker):
    limited = params(
        1, thinking_token_budget=10, structured_outputs={"choice": ["yes", "no"]}, max_tokens=80
    )
    (output,) = thinker.chat(HI, limited, chat_template_kwargs={"thinks": True})
    completion = output.outputs[0]
    assert completion.reasoning and completion.content in ("yes", "no")
    (output,) = thinker.chat(HI, limited)
    completion = output.outputs[0]
    assert completion.content in ("yes", "no")


def test_a_model_without_thoughts_takes_no_budget_of_them(llm):
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(HI, params(thinking_token_budget=5))
    assert caught.value.field == "thinking_token_budget"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [{"type": "x"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ],
)
def test_wrong_arguments_are_named(llm, asked, field):
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(HI, params(), **asked)
    assert caught.value.field == field


def test_calls_and_constraints_that_exclude_each_other_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="no room for calls"):
        llm.chat(
            HI,
            params(structured_outputs={"regex": "a+"}),
            chat_template=TEMPLATE,
            tools=[TOOL],
        )
