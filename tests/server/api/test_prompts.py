"""Prompts: off the loop when large, refused when hopeless, and options that work or are refused."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from pace import python_seconds

from octavo.base.errors import InvalidRequestError, PromptTooLongError
from octavo.server.api import prompts
from octavo.server.api.prompts import PromptRenderer
from octavo.server.http.context import IgnoredFields
from octavo.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]

RICH = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.x }})"
    "{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for d in documents or [] %}<{{ d.title }}>{% endfor %}"
    "{% if reasoning_effort %}effort={{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def renderer(byte_tokenizer) -> PromptRenderer:
    return PromptRenderer(byte_tokenizer)


@pytest.fixture
def rich(byte_tokenizer) -> PromptRenderer:
    return PromptRenderer(byte_tokenizer, chat_template=RICH, trust_request_chat_template=True)


def chat(renderer: PromptRenderer, messages=USER, **options) -> str:
    return asyncio.run(renderer.chat(messages, **options)).text


def test_text_becomes_tokens_and_special_names_stay_text(renderer):
    async def run():
        ids = await renderer.text("a<eos>b")
        assert len(ids) == 7 and max(ids) < 256
        assert await renderer.detokenize([ids[0], 256, ids[-1]]) == "a<eos>b"

    asyncio.run(run())


def test_text_is_tokenized_in_the_background(renderer, monkeypatch):
    threads = []
    encode = Tokenizer.encode

    def watched(self, *args, **options):
        threads.append(threading.current_thread())
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    asyncio.run(renderer.text("a" * prompts.SMALL_TEXT))
    asyncio.run(renderer.text("a" * (prompts.SMALL_TEXT + 1)))
    assert threading.main_thread() not in threads
    assert len(set(threads)) == 2, "long ones hold up no short ones"


def test_conversations_are_rendered_in_the_background(renderer, monkeypatch):
    threads = []
    chat_prompt = Tokenizer.chat_prompt

    def watched(self, *args, **options):
        threads.append(threading.current_thread())
        return chat_prompt(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "chat_prompt", watched)
    parts = [{"type": "text", "text": "a" * 100}] * 50
    chat(renderer)
    chat(renderer, [{"role": "user", "content": parts}])
    assert threading.main_thread() not in threads
    assert len(set(threads)) == 2, "long ones hold up no short ones"


def test_a_hopeless_text_is_refused_before_it_is_tokenized(renderer, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(Tokenizer, "chat_prompt", None)
    # The longest token is a special one, of 13 bytes.
    hopeless = "a" * (13 * 1000 + 1)
    with pytest.raises(PromptTooLongError):
        asyncio.run(renderer.text(hopeless, limit=1000))
    for content in (hopeless, [{"type": "text", "text": hopeless}]):
        with pytest.raises(PromptTooLongError):
            chat(renderer, [{"role": "user", "content": content}], limit=1000)


def test_a_text_that_may_fit_is_tokenized(renderer):
    async def run():
        assert len(await renderer.text("a" * 13_000, limit=1000)) == 13_000
        assert len(await renderer.text("a" * 13_001)) == 13_001

    asyncio.run(run())


@pytest.mark.timing
def test_the_loop_goes_on_while_a_megabyte_is_tokenized(renderer):
    async def longest_stall() -> float:
        work = asyncio.ensure_future(
            renderer.chat([{"role": "user", "content": "The <eos> fox. " * 65_000}])
        )
        longest, last = 0.0, time.process_time()
        while not work.done():
            await asyncio.sleep(0.001)
            now = time.process_time()
            longest, last = max(longest, now - last), now
        assert len((await work).token_ids) > 900_000
        return longest

    assert any(asyncio.run(longest_stall()) < python_seconds(3e6) for _ in range(2))


def test_options_reach_the_template(rich):
    tools = [{"type": "function", "function": {"name": "look"}}]
    text = chat(
        rich,
        tools=tools,
        documents=[{"title": "T"}],
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
    )
    assert text == "[user]hi<look><T>effort=lowthinking=False[assistant]"
    assert chat(rich, add_generation_prompt=False) == "[user]hi"


def test_an_effort_that_the_template_does_not_know_is_ignored(renderer, rich):
    ignored = IgnoredFields()
    assert chat(renderer, reasoning_effort="low", ignored=ignored) == chat(renderer)
    assert ignored.names == ("reasoning_effort",)
    known = IgnoredFields()
    chat(rich, reasoning_effort="low", ignored=known)
    assert known.names == ()


@pytest.mark.parametrize(
    ("name", "value", "noted"),
    [
        ("thinking", True, "enable_thinking"),
        ("thinking", False, None),  # it does not think anyhow
        ("reasoning_effort", "none", None),
        (
            "chat_template_kwargs",
            {"enable_thinking": False},
            "chat_template_kwargs.enable_thinking",
        ),
        ("chat_template_kwargs", {"message": 1}, "chat_template_kwargs.message"),
    ],
)
def test_what_the_template_does_not_read_is_noted(renderer, name, value, noted):
    ignored = IgnoredFields()
    assert chat(renderer, **{name: value}, ignored=ignored) == chat(renderer)
    assert ignored.names == ((noted,) if noted else ())


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("documents", [{"title": "T"}], "documents"),
        ("reasoning_effort", "low", "reasoning_effort"),
        ("thinking", True, "enable_thinking"),
        ("chat_template_kwargs", {"x": 1}, "chat_template_kwargs.x"),
    ],
)
def test_what_the_template_has_no_place_for_is_refused(renderer, name, value, field):
    with pytest.raises(InvalidRequestError) as caught:
        chat(renderer, **{name: value}, ignored=IgnoredFields(strict=True))
    assert caught.value.field == field
    assert chat(renderer, **{name: None}) == chat(renderer)


def test_an_effort_goes_by_the_name_that_the_template_has_for_it(byte_tokenizer):
    renderer = PromptRenderer(byte_tokenizer, chat_template="{{ thinking_effort }}")
    assert chat(renderer, reasoning_effort="max") == "max"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_reserved_variables_cannot_be_replaced(rich, name):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        chat(rich, chat_template_kwargs={name: "x"})
    assert caught.value.field == "chat_template_kwargs"


def test_a_template_of_the_request_needs_trust(renderer, rich):
    with pytest.raises(InvalidRequestError) as caught:
        chat(renderer, chat_template="mine")
    assert caught.value.field == "chat_template"
    assert chat(rich, chat_template="mine") == "mine"


def test_developer_is_system_where_the_template_does_not_know_it(renderer, byte_tokenizer):
    messages = [{"role": "developer", "content": "be brief"}]
    assert chat(renderer, messages) == "<|system|>be brief<eos><|assistant|>"
    template = "{% for m in messages %}{% if m.role == 'developer' %}DEV{% endif %}{% endfor %}"
    assert chat(PromptRenderer(byte_tokenizer, chat_template=template), messages) == "DEV"


def test_the_final_message_can_be_continued(renderer):
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat(renderer, messages, **options).endswith("<|assistant|>Well, ")
    with pytest.raises(InvalidRequestError) as caught:
        chat(renderer, messages, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_arguments_of_tool_calls_are_objects_to_the_template(rich):
    def messages(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    assert "(f 3)" in chat(rich, messages('{"x": 3}'))
    for wrong in ("[1]", "x", "3"):
        with pytest.raises(InvalidRequestError) as caught:
            chat(rich, messages(wrong))
        assert caught.value.field == "messages.1.tool_calls.0.function.arguments"


def test_bos_only_when_asked_for(renderer):
    async def run():
        plain = await renderer.chat(USER)
        assert plain.token_ids[0] != 257
        assert (await renderer.chat(USER, add_special_tokens=True)).token_ids == [
            257,
            *plain.token_ids,
        ]

    asyncio.run(run())


def test_numbers_of_messages_and_tools_are_bounded(rich):
    with pytest.raises(InvalidRequestError, match="4096"):
        chat(rich, USER * 4097)
    with pytest.raises(InvalidRequestError, match="128"):
        chat(rich, tools=[{"function": {"name": "f"}}] * 129)
