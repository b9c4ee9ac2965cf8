from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from octavo.agents.python_tools import tools_of_file
from octavo.base.errors import ConfigError, ToolError


@pytest.fixture
def tools_of(tmp_path: Path):
    """``tools_of(source)`` returns the tools of a file by their names."""

    def write(source: str) -> dict:
        path = tmp_path / "tools.py"
        path.write_text(dedent(source))
        return {each.tool.name: each for each in tools_of_file(path)}

    return write


def test_the_schema_is_that_of_signature_and_docstring(tools_of) -> None:
    known = tools_of(
        '''
        from __future__ import annotations
        from dataclasses import dataclass
        from typing import Annotated, Literal
        from pydantic import Field

        @dataclass
        class Place:
            city: str
            country: str = "FR"

        def weather(
            place: Place, unit: Literal["C", "F"] = "C", days: Annotated[int, Field(ge=1)] = 1
        ) -> str:
            """Return the weather of a place.

            It is always fine.
            """
            return f"{place.city}: fine, {unit}, {days}"
        '''
    )
    tool = known["weather"].tool
    assert tool.description == "Return the weather of a place.\n\nIt is always fine."
    properties = tool.parameters["properties"]
    assert properties["unit"] == {"enum": ["C", "F"], "type": "string", "default": "C"}
    assert properties["days"] == {"type": "integer", "minimum": 1, "default": 1}
    assert tool.parameters["required"] == ["place"]
    arguments = {"place": {"city": "Paris"}, "unit": "F", "days": "2"}
    assert known["weather"].run(arguments) == "Paris: fine, F, 2"


def test_public_functions_of_the_file_are_tools(tools_of) -> None:
    source = """
        from textwrap import indent

        class Thing: ...
        def first(): ...
        def _second(): ...
        third = lambda: 3
        """
    assert set(tools_of(source)) == {"first"}
    assert set(tools_of(source + "__all__ = ['indent', '_second']")) == {"indent", "_second"}


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("def f(): return 'a\\nb'", "a\nb"),
        ("def f(): return {'a': [1, None, True]}", '{"a":[1,null,true]}'),
        ("def f(): pass", "null"),
        ("import datetime\ndef f(): return datetime.date(2026, 1, 2)", '"2026-01-02"'),
        ("def f(): return type('T', (), {'__str__': lambda self: 'T'})()", '"T"'),
        ("async def f(): return 3", "3"),
    ],
)
def test_results_are_text_or_json(tools_of, source: str, result: str) -> None:
    assert tools_of(source)["f"].run({}) == result


def test_wrong_arguments_and_exceptions_are_told(tools_of) -> None:
    known = tools_of("def half(n: int): return n / 2\ndef fail(): raise KeyError('x')")
    with pytest.raises(ToolError, match="n: Input should be a valid integer.*other: Unexpected"):
        known["half"].run({"n": "many", "other": 1})
    with pytest.raises(ToolError, match="n: Missing required"):
        known["half"].run({})
    with pytest.raises(ToolError, match="KeyError: 'x'"):
        known["fail"].run({})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(a, /): ...", "f cannot be a tool: its parameters must have names"),
        ("from __future__ import annotations\ndef f(x: Nothing): ...", "f cannot be a tool"),
        ("class C: ...\nC.x = 1\ndef f(x: C): ...", "f cannot be a tool"),
        ("x = 1", "no function"),
        ("__all__ = ['f']", "names 'f', which is no function"),
        ("1 / 0", "fails: ZeroDivisionError"),
        ("def", "fails: SyntaxError"),
    ],
)
def test_what_cannot_be_a_tool_is_said(tools_of, source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        tools_of(source)
    assert "tools.py" in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        tools_of_file(tmp_path / "none.py")
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with pytest.raises(ConfigError, match="should end with .py"):
        tools_of_file(text)
