from __future__ import annotations

import pytest

from octavo.base.errors import InvalidRequestError
from octavo.chat_formats.tools import Tool, ToolChoice, tools_of

F = {"type": "function", "function": {"name": "f", "description": "F.", "strict": True}}
G = {"name": "g", "parameters": {"properties": {"a": {}}}}


def test_tools_are_read_with_and_without_what_is_around_them():
    f, g = tools_of([F, G])
    assert (f.name, f.description, f.is_strict) == ("f", "F.", True)
    assert f.parameters == {"type": "object", "properties": {}}  # it has none
    assert g.parameters == {"type": "object", "properties": {"a": {}}}
    assert tools_of([f, g]) == (f, g)
    assert Tool.of(f.to_dict(), "tools[0]") == f


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        (["f"], "tools[0]"),
        ([{"name": "f", "strict": "yes"}], "tools[0].strict"),
        ([F, {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"name": "a b"}], "tools[0].name"),
        ([{"name": 'a"'}], "tools[0].name"),
        ([{"name": "f", "parameters": []}], "tools[0].parameters"),
        ([{"name": "f", "parameters": {"type": "string"}}], "tools[0].parameters.type"),
        ([F, F], "tools[1].name"),
    ],
)
def test_tools_that_are_none_are_refused_by_place(tools, field):
    with pytest.raises(InvalidRequestError) as error:
        tools_of(tools)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("value", "mode", "among"),
    [
        (None, "auto", "fg"),
        ("auto", "auto", "fg"),
        ("required", "required", "fg"),
        ("none", "none", ""),
        ({"type": "function", "function": {"name": "g"}}, "required", "g"),
        ({"type": "function", "name": "g"}, "required", "g"),  # of the Responses API
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F]}},
            "auto",
            "f",
        ),
    ],
)
def test_choices_are_those_of_openai(value, mode, among):
    tools = tools_of([F, G])
    choice = ToolChoice.of(value, tools)
    assert choice.mode == mode
    assert "".join(tool.name for tool in choice.among(tools)) == among


@pytest.mark.parametrize(
    "value",
    ["any", 1, {"type": "function"}, {"name": "h"}, {"type": "allowed_tools"}, {"type": "x"}],
)
def test_choices_of_nothing_are_refused(value):
    with pytest.raises(InvalidRequestError) as error:
        ToolChoice.of(value, tools_of([F, G]))
    assert error.value.field is not None and error.value.field.startswith("tool_choice")


def test_without_tools_none_can_be_required():
    assert ToolChoice.of(None, ()).mode == "none"
    with pytest.raises(InvalidRequestError, match="no tools"):
        ToolChoice.of("required", ())
