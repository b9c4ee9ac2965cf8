"""Messages and tools as templates that leave something out are given them."""

from __future__ import annotations

import json

from format_cases import CASES, CLOCK, PARIS, WEATHER

from octavo.chat_formats.chat_format import parse
from octavo.chat_formats.tools import tools_of


def call(name: str, arguments: str, call_id: str) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": call_id}


USER = {"role": "user", "content": "Hi"}
FIRST, SECOND = call("get_weather", PARIS, "1"), call("clock", "{}", "2")
BOTH = {"role": "assistant", "content": "I look.", "tool_calls": [FIRST, SECOND]}


def test_calls_are_written_where_a_template_leaves_them_out():
    for name in ("granite-3", "phi-4-mini"):
        format = CASES[name].format()
        (user, written, last), tools = format.prompt([USER, BOTH, result("1")], ())
        assert (user, last, tools) == (USER, result("1"), None)
        message = parse(format, written["content"], [WEATHER, CLOCK])
        assert message.content == "I look."
        assert [(each.name, each.arguments) for each in message.tool_calls] == [
            ("get_weather", PARIS),
            ("clock", "{}"),
        ]


def test_phi_gets_its_tools_in_the_system_message():
    case = CASES["phi-4-mini"]
    format = case.kind(case.format().template._replace(source="message['tools']"))
    (system, user), tools = format.prompt([USER], tools_of([WEATHER]))
    assert tools is None and user == USER
    assert json.loads(system["tools"]) == [WEATHER["function"]]
    (system, _), _ = format.prompt([{"role": "system", "content": "Be kind."}, USER], ())
    assert system == {"role": "system", "content": "Be kind."}


def test_harmony_has_one_call_in_a_message_and_its_result_behind_it():
    format = CASES["harmony"].format()
    thinking = {**BOTH, "reasoning": "Hm."}
    messages, _ = format.prompt([USER, thinking, result("2"), result("1"), USER], ())
    assert messages == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "reasoning": "Hm.\n\nI look.",
            "tool_calls": [FIRST],
        },
        result("1"),
        {"role": "assistant", "tool_calls": [SECOND]},
        result("2"),
        USER,
    ]
