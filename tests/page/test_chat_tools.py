"""Thoughts, tool calls and structured answers in the chat, in a real browser."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow
ANSWER = "article.answer .round:last-child > .prose"
STATS = "article.answer .stats"
CALLS = "[...document.querySelectorAll('.call > summary')].map((each) => each.textContent)"
ATTACK = "<img src=x onerror='window.pwned = 1'>"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def call(index: int, name: str, arguments: str) -> list[dict]:
    """The deltas of one call, in pieces."""
    begun = {"name": name, "arguments": ""}
    first = {"index": index, "id": f"call-{index}", "type": "function", "function": begun}
    pieces = [arguments[at : at + 5] for at in range(0, len(arguments), 5)]
    return [
        {"tool_calls": [each]}
        for each in (first, *({"index": index, "function": {"arguments": p}} for p in pieces))
    ]


def thought(text: str) -> list[dict]:
    words = text.split(" ")
    return [{"reasoning_content": f"{word} ", "reasoning": f"{word} "} for word in words]


def choose(tab, **settings: str) -> None:
    tab.click("#open-settings")
    for name, value in settings.items():
        tab.js(f"""(() => {{
            const input = document.getElementById({json.dumps(name)});
            input.value = {json.dumps(value)};
            input.dispatchEvent(new Event("input", {{bubbles: true}}));
        }})()""")
    tab.press("Escape")
    tab.wait_for("!settings.open")


@pytest.fixture
def ready(tab):
    tab.open()
    tab.wait_for_text("#model-name", "octavo-test")
    return tab


def test_a_thought_is_open_while_it_grows_and_folded_afterwards(ready, chats):
    chats.delay = 0.02
    chats.answers["go"] = [*thought("one two three " * 20 + ATTACK), "The ", "answer."]
    ready.send("go")
    ready.wait_for_text(".thought > summary", "Thinking for")
    assert ready.js("document.querySelector('.thought').open")
    ready.wait_for_text(".thought", "three one")
    ready.wait_for_text(STATS, "cached")
    assert ready.text(ANSWER) == "The answer."
    assert ready.text(".thought > summary").startswith("Thought for ")
    assert ready.js("document.querySelector('.thought').open") is False
    ready.js("document.querySelector('.thought > summary').focus()")
    ready.press("Enter")
    ready.wait_for("document.querySelector('.thought').open")
    assert ATTACK in ready.text(".thought")
    assert ready.js("window.pwned ?? null") is None
    ready.open()
    ready.wait_for_text(".thought > summary", "Thought for ")
    chats.delay = 0.0
    ready.send("count 1")
    ready.wait_for("document.querySelectorAll('.turn').length === 2")
    ready.wait_for_text(STATS, "cached")
    sent = chats.requests[-1]["messages"][1]
    assert sent["content"] == "The answer."
    assert sent["reasoning_content"].endswith(f"three {ATTACK} ")


def test_tools_are_called_and_answered_until_the_answer_is_there(ready, chats):
    expression = '{"expression": "6 * 7"}'
    chats.answers["go"] = [
        *thought("I need tools"), "Let me see.", *call(0, "calculator", expression),
        *call(1, "calculator", '{"expression": "1 / 0"}'),
    ]  # fmt: skip
    chats.answers["Error: It divides by zero."] = call(0, "current_time", "{}")
    choose(ready, tools="on")
    assert ready.text("#form-note") == "Tools: current_time, calculator"
    chats.otherwise = ["So late."]  # no test can foresee the time
    ready.send("go")
    ready.wait_for_text(ANSWER, "So late.")
    ready.wait_for_text(STATS, "cached")
    assert ready.text(STATS).startswith("round 3")
    assert ready.js("[...document.querySelectorAll('.round-title')].map((e) => e.textContent)") == [
        "Round 2 of at most 8",
        "Round 3 of at most 8",
    ]
    assert ready.js(CALLS)[:2] == [
        'calculator {"expression": "6 * 7"} → 42',
        'calculator {"expression": "1 / 0"} → Error: It divides by zero.',
    ]
    first, second, third = chats.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["current_time", "calculator"]
    assert [message["role"] for message in second["messages"]] == [
        "user", "assistant", "tool", "tool",
    ]  # fmt: skip
    said = second["messages"][1]
    assert (said["content"], said["reasoning_content"]) == ("Let me see.", "I need tools ")
    assert said["tool_calls"][0] == {
        "id": "call-0", "type": "function",
        "function": {"name": "calculator", "arguments": expression},
    }  # fmt: skip
    assert second["messages"][2:] == [
        {"role": "tool", "tool_call_id": "call-0", "content": "42"},
        {"role": "tool", "tool_call_id": "call-1", "content": "Error: It divides by zero."},
    ]
    assert len(third["messages"]) == 6
    assert ready.js(CALLS)[2] == f"current_time {{}} → {third['messages'][-1]['content']}"
    assert set(json.loads(third["messages"][-1]["content"])) == {
        "date", "time", "timezone", "utc_offset",
    }  # fmt: skip

    ready.click(".actions button", "Regenerate")  # from the question on
    ready.wait_for("document.querySelectorAll('.round').length === 3")
    ready.wait_for_text(STATS, "cached")
    assert chats.requests[3]["messages"] == first["messages"]
    ready.open()
    ready.wait_for("document.querySelectorAll('.call').length === 3")
    ready.send("count 1")
    ready.wait_for("document.querySelectorAll('.turn').length === 2")
    ready.wait_for_text(STATS, "prompt")
    roles = [message["role"] for message in chats.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "user"]
    ready.js("document.querySelector('.user .actions button').click()")
    ready.js("document.activeElement.select()")
    ready.write("count 3")
    ready.press("Enter")
    ready.wait_for("document.querySelectorAll('.turn').length === 1")
    ready.wait_for_text(STATS, "cached")
    assert [m["content"] for m in chats.requests[-1]["messages"]] == ["count 3"]


def test_a_model_that_only_calls_is_stopped(ready, chats):
    chats.otherwise = call(0, "search", json.dumps({"query": ATTACK}))
    choose(ready, tools="on")
    ready.send("go")
    ready.wait_for_text(".note", "It was stopped after 8 rounds of tool calls.")
    assert len(chats.requests) == 8
    assert 'There is no tool "search"' in ready.text(".call-state")
    assert ready.js("window.pwned ?? null") is None
    assert ready.js("log.querySelectorAll('img').length") == 0


def test_stopping_ends_the_loop(ready, chats, wait_until):
    chats.delay = 0.1
    chats.otherwise = call(0, "calculator", '{"expression": "1"}')
    choose(ready, tools="on")
    ready.send("go")
    ready.wait_for("document.querySelectorAll('.round').length === 2")
    ready.click("#stop")
    ready.wait_for_text(".note:not([hidden])", "You stopped it.")
    wait_until(lambda: chats.left == 1)
    assert len(chats.requests) == 2


def test_tools_are_neither_offered_nor_run_unless_switched_on(ready, chats):
    chats.answers["go"] = call(0, "calculator", '{"expression": "1"}')
    ready.send("go")
    ready.wait_for_text(".answer > .note", "switched off")
    assert "tools" not in chats.requests[0]
    assert len(chats.requests) == 1
    assert ready.text(".call-state") == "not run"


def test_json_is_a_tree_that_folds(ready, browser, chats):
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.call(
        "Browser.grantPermissions", permissions=permissions, browserContextId=ready.context
    )
    raw = json.dumps({
        "id": 12345678901234567890, "name": ATTACK, "none": {}, "list": list(range(150)),
        "a": {"b": {"c": {"d": [True, None]}}},
    })  # fmt: skip
    chats.answers["go"] = [raw[:40], raw[40:]]
    ready.send("go")
    ready.wait_for_text(STATS, "cached")
    tree = ready.text(".json-tree")
    assert '"id": 12345678901234567890' in tree
    assert json.dumps(ATTACK) in tree
    assert '"list": […] 150 items' in tree
    assert ready.text(".json-tree button") == "Show more (50)"
    ready.click(".json-tree button")
    ready.wait_for("!document.querySelector('.json-tree button')")
    assert '"d"' not in ready.text(".json-tree")  # further in than what is open at first
    ready.js("[...document.querySelectorAll('.json-tree summary')].at(-1).focus()")
    ready.press("Enter")
    ready.wait_for_text(".json-tree", '"d": […] 2 items')
    ready.js("document.querySelector('.json-tree summary').click()")
    ready.wait_for("!document.querySelector('.json-tree').innerText.includes('name')")
    ready.click(".copy-code")
    ready.wait_for_text(".copy-code", "Copied")
    assert ready.js("navigator.clipboard.readText()") == raw
    ready.click(".code-head .plain", "As text")
    assert ready.text(".code-box pre") == raw
    assert ready.js("window.pwned ?? null") is None


def test_json_that_was_asked_for_is_text_until_it_is_whole(ready, chats):
    chats.delay = 0.02
    chats.answers["go"] = ['{"a_b_c": [', *[f"{n}, " for n in range(60)], "0]}"]
    choose(ready, format="json")
    ready.send("go")
    ready.wait_for_text(".json-text", '{"a_b_c": [0, 1')
    ready.wait_for_text(".json-tree", '"a_b_c": […] 61 items')
    chats.end = {"finish_reason": "length"}
    chats.answers["cut"] = ['{"a": ', "[1"]
    ready.send("cut")
    ready.wait_for_text(STATS, "cached")
    ready.wait_for_text(".json-text", '{"a": [1')
    chats.answers["no"] = ["[1] is no JSON"]
    choose(ready, format="")
    ready.send("no")
    ready.wait_for_text(ANSWER, "[1] is no JSON")


def test_a_schema_is_checked_and_sent(ready, chats):
    ready.click("#open-settings")
    assert not ready.js("json_schema.checkVisibility()")
    ready.js("format.value = 'json'; format.dispatchEvent(new Event('input', {bubbles: true}))")
    ready.click("#json_schema")
    ready.write(json.dumps(SCHEMA))
    assert ready.text("#json_schema-problem") == ""
    ready.write("}")
    ready.wait_for_text("#json_schema-problem", "This is not JSON:")
    assert ready.js("json_schema.ariaInvalid") == "true"
    ready.press("Escape")
    ready.wait_for_text("#form-note", "Answers: JSON of a schema")
    for _ in range(2):
        ready.send("count 1")
        ready.wait_for_text(STATS, "cached")
        assert chats.requests[-1]["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
        }
        ready.open()
        ready.wait_for_text("#model-name", "octavo-test")
    choose(ready, format="choice", choice="yes\nno")
    ready.send("count 2")
    ready.wait_for_text(STATS, "2 tokens")
    assert chats.requests[-1]["structured_outputs"] == {"choice": ["yes", "no"]}
    assert "response_format" not in chats.requests[-1]
    ready.click("#form-note")
    ready.wait_for("settings.open && document.activeElement.id === 'format'")
    ready.click("#reset")
    assert ready.js("[format.value, choice.value, choice.checkVisibility()]") == ["", "", False]
    assert ready.js("document.getElementById('form-note').hidden")


def fill(tab, chats) -> None:
    """A conversation that has everything, wide and long."""
    wide = "W" * 300
    chats.answers["go"] = [
        *thought(f"a thought\n\n{wide}"), "Let me see.",
        *call(0, "calculator", json.dumps({"expression": "1 + " * 60 + "1"})),
        *call(1, "calculator", json.dumps({"expression": wide})),
        *call(2, "calculator", "{}"),
    ]  # fmt: skip
    chats.otherwise = [json.dumps({wide: wide, "list": [1, 2, {"a": None}], "text": "word " * 80})]
    choose(tab, tools="on", format="json", json_schema="{")
    tab.send("go")
    tab.wait_for_text(STATS, "cached")
    tab.wait_for("document.querySelectorAll('.json-tree').length > 0")
    tab.js("document.querySelectorAll('.thought, .call').forEach((each) => { each.open = true; })")


@pytest.mark.parametrize("width", [320, 390, 1440])
def test_nothing_sticks_out(tab, chats, width):
    tab.show(width, 800, touch=width < 1000)
    tab.open()
    tab.wait_for_text("#model-name", "octavo-test")
    fill(tab, chats)
    assert tab.overflowing() == []
    assert tab.js("scroller.scrollWidth <= scroller.clientWidth")
    tab.click("#open-settings")
    assert tab.overflowing("#settings") == []


def test_nobody_is_kept_out(ready, chats):
    fill(ready, chats)
    assert ready.barriers() == []
    ready.js("document.activeElement.blur()")
    assert ready.lost_steps() == []
    ready.click("#open-settings")
    assert ready.barriers() == []
