from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.agents.tool_loop import LoopEnd, run_tool_loop
from octavo.agents.toolbox import Toolbox, ToolResult
from octavo.base.errors import ConfigError, ToolError
from octavo.chat_formats.messages import ParsedMessage, ToolCall
from octavo.chat_formats.tools import Tool


@dataclass
class Echo:
    """A tool that says its arguments, or does something else."""

    name: str = "echo"
    action: Callable[[Mapping[str, Any]], str] = str

    @property
    def tool(self) -> Tool:
        return Tool(self.name)

    def run(self, arguments: Mapping[str, Any]) -> str:
        return self.action(arguments)


@dataclass
class Script:
    """A model that answers by a script, and a user who agrees to all calls but some."""

    answers: list[ParsedMessage | None]
    refused: tuple[str, ...] = ()
    shown: list[ToolResult] = field(default_factory=list)
    seen: list[list[dict]] = field(default_factory=list)

    def answer(self, messages: list[dict]) -> ParsedMessage | None:
        self.seen.append([dict(message) for message in messages])
        return self.answers.pop(0)

    def allows(self, call: ToolCall) -> bool:
        if call.id == "interrupt":
            raise KeyboardInterrupt
        return call.id not in self.refused

    def show(self, call: ToolCall, result: ToolResult) -> None:
        self.shown.append(result)


def calls(*ids: str, name: str = "echo", arguments: str = '{"x": 1}') -> ParsedMessage:
    return ParsedMessage(None, None, [ToolCall(each, name, arguments) for each in ids])


def question() -> list[dict]:
    return [{"role": "user", "content": "?"}]


def contents(messages: list[dict]) -> list[str]:
    return [message["content"] for message in messages]


def test_results_go_back_to_the_model() -> None:
    script = Script([calls("a", "b"), ParsedMessage("thought", "done")])
    messages = question()
    assert run_tool_loop(messages, script, Toolbox([Echo()])) is LoopEnd.ANSWERED
    assert messages[1]["tool_calls"][1] == {
        "id": "b",
        "type": "function",
        "function": {"name": "echo", "arguments": '{"x": 1}'},
    }
    assert messages[2] == {
        "role": "tool",
        "tool_call_id": "a",
        "name": "echo",
        "content": "{'x': 1}",
    }
    assert messages[4] == {
        "role": "assistant",
        "content": "done",
        "reasoning_content": "thought",
    }
    assert script.seen == [messages[:1], messages[:4]]


def test_turns_are_bounded() -> None:
    script = Script([calls(str(i)) for i in range(9)])
    messages = question()
    end = run_tool_loop(messages, script, Toolbox([Echo()]), max_turns=3)
    assert end is LoopEnd.TOO_MANY_TURNS
    assert len(messages) == 1 + 3 * 2 and len(script.answers) == 6


def test_refused_calls_are_not_made_and_the_model_is_told() -> None:
    script = Script([calls("a", "b"), ParsedMessage(content="done")], refused=("a",))
    messages = question()
    assert run_tool_loop(messages, script, Toolbox([Echo()])) is LoopEnd.ANSWERED
    assert contents(messages[2:4]) == ["error: the user refused this call", "{'x': 1}"]
    assert [result.is_error for result in script.shown] == [True, False]


@pytest.mark.parametrize("where", ["question", "call"])
def test_an_interrupt_ends_the_loop_and_leaves_no_call_without_a_result(where: str) -> None:
    def act(arguments: Mapping[str, Any]) -> str:
        raise KeyboardInterrupt

    first = "interrupt" if where == "question" else "a"
    script = Script([calls(first, "b")])
    messages = question()
    assert run_tool_loop(messages, script, Toolbox([Echo(action=act)])) is LoopEnd.INTERRUPTED
    assert [message.get("tool_call_id") for message in messages] == [None, None, first, "b"]
    assert contents(messages[2:]) == [
        "error: the user interrupted this call",
        "error: this call was not made: the user interrupted",
    ]


def test_an_answer_that_was_not_made_ends_the_loop() -> None:
    messages = question()
    assert run_tool_loop(messages, Script([None]), Toolbox([])) is LoopEnd.STOPPED
    assert messages == question()


def fail(arguments: Mapping[str, Any]) -> str:
    raise ToolError("no wind")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("nothing", "{}", "no tool 'nothing', only echo, fail"),
        ("echo", "{", "the arguments are no JSON"),
        ("echo", "[1]", "the arguments are no JSON object"),
        ("fail", "{}", "error: no wind"),
    ],
)
def test_errors_are_results(name: str, arguments: str, words: str) -> None:
    toolbox = Toolbox([Echo(), Echo("fail", fail)])
    result = toolbox.call(ToolCall("1", name, arguments))
    assert result.is_error and words in result.text


def test_no_arguments_are_none() -> None:
    assert Toolbox([Echo()]).call(ToolCall("1", "echo", "")) == ToolResult("{}")


def test_long_results_are_cut_and_say_so() -> None:
    toolbox = Toolbox([Echo(action=lambda arguments: "x" * 50_000)])
    text = toolbox.call(ToolCall("1", "echo", "{}")).text
    assert len(text) < 21_000 and text.endswith("[cut here: the result has 50,000 characters]")


def test_two_tools_of_one_name() -> None:
    with pytest.raises(ConfigError, match="two tools have the name 'echo'"):
        Toolbox([Echo(), Echo()])
