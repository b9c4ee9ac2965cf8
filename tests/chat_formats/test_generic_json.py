from __future__ import annotations

import json

from format_cases import CASES, WEATHER

from octavo.chat_formats.chat_format import parse
from octavo.chat_formats.tools import tools_of

FORMAT = CASES["generic-json"].format()
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"a": 1}'}}


def test_tools_are_told_in_the_system_message():
    for messages in ([], [{"role": "system", "content": "Be kind."}]):
        user = {"role": "user", "content": "Hi"}
        (system, last), tools = FORMAT.prompt([*messages, user], tools_of([WEATHER]))
        assert tools is None and last == user
        assert system["role"] == "system" and '"get_weather"' in system["content"]
        assert '{"tool_calls": [' in system["content"]
        assert system["content"].startswith("Be kind.") == bool(messages)


def test_earlier_calls_are_written_as_the_model_writes_them():
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "12 °C"},
    ]
    (call, result), _ = FORMAT.prompt(messages, ())
    assert call.keys() == {"role", "content"} and result["role"] == "user"
    assert "12 °C" in result["content"]
    (again,) = parse(FORMAT, call["content"], [WEATHER]).tool_calls
    assert (again.name, json.loads(again.arguments)) == ("get_weather", {"a": 1})


def test_other_messages_stay_as_they_are():
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert FORMAT.prompt(messages, ()) == (messages, None)


def test_formats_of_templates_that_know_tools_leave_it_to_these():
    messages = [{"role": "user", "content": "Hi"}]
    tools = tools_of([WEATHER])
    assert CASES["hermes"].format().prompt(messages, tools) == (messages, [tools[0].to_dict()])
    assert CASES["hermes"].format().prompt(messages, ()) == (messages, None)
