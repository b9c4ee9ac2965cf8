"""Tools that a model may call, and the choice among them that a request makes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.base.errors import InvalidRequestError

# Names go into grammars, tags and Python-like calls as they are. Those of MCP have dots, slashes.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
_ANY_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Args:
        parameters: the JSON schema of the object of its arguments.
        is_strict: whether a schema that cannot be enforced in full is refused even if the model may
            do without a call.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _ANY_ARGUMENTS)
    is_strict: bool = False

    @classmethod
    def of(cls, value: Any, where: str) -> Tool:
        """Make a tool of OpenAI's object, ``{"type": "function", "function": {...}}``, or of what
        is in it.

        Raises:
            InvalidRequestError: a field is missing or wrong; ``where`` and the field are named.
        """
        if isinstance(value, Tool):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequestError("must be an object", where)
        if value.get("type", "function") != "function":
            raise InvalidRequestError(
                f"only functions can be called, not {value['type']!r:.80}", f"{where}.type"
            )
        function = value.get("function", value)
        where = f"{where}.function" if "function" in value else where
        if not isinstance(function, Mapping):
            raise InvalidRequestError("must be an object", where)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"must be of up to 128 letters, digits and '_-.:/', not {name!r:.80}",
                f"{where}.name",
            )
        description = function.get("description") or ""
        if not isinstance(description, str):
            raise InvalidRequestError("must be a text", f"{where}.description")
        parameters = function.get("parameters")
        if parameters is None or parameters == {}:
            parameters = _ANY_ARGUMENTS
        if not isinstance(parameters, Mapping):
            raise InvalidRequestError("must be a JSON schema", f"{where}.parameters")
        if parameters.get("type", "object") != "object":
            raise InvalidRequestError(
                "must be 'object': arguments have names", f"{where}.parameters.type"
            )
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise InvalidRequestError("must be true or false", f"{where}.strict")
        return cls(name, description, {"type": "object", **parameters}, bool(strict))

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's object of the tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        if self.is_strict:
            function["strict"] = True
        return {"type": "function", "function": function}


def tools_of(values: Iterable[Any] | None, where: str = "tools") -> tuple[Tool, ...]:
    """Return the tools of a request; two of one name are an error."""
    tools = tuple(Tool.of(value, f"{where}[{i}]") for i, value in enumerate(values or ()))
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidRequestError(f"{tool.name!r} is there twice", f"{where}[{i}].name")
        names.add(tool.name)
    return tools


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called.

    Args:
        mode: ``auto``, the model decides; ``required``, it calls one at least; ``none``.
        names: the tools that may be called; None: all.
    """

    mode: str = "auto"
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, value: Any, tools: Sequence[Tool], where: str = "tool_choice") -> ToolChoice:
        """Make a choice of OpenAI's ``tool_choice``: a mode, a function, or ``allowed_tools``.

        Without a value it is ``auto`` if there are tools.

        Raises:
            InvalidRequestError: it is none of these, names a tool that is not there, or asks for a
                call without tools.
        """
        if value is None:
            return cls("auto" if tools else "none")
        if isinstance(value, str):
            if value not in ("auto", "none", "required"):
                raise InvalidRequestError(
                    f"must be 'auto', 'none', 'required' or a function, not {value!r:.80}", where
                )
            choice = cls(value)
        elif not isinstance(value, Mapping):
            raise InvalidRequestError("must be a text or an object", where)
        elif value.get("type") == "allowed_tools":
            allowed = value.get("allowed_tools", value)
            mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
            if mode not in ("auto", "required"):
                raise InvalidRequestError(
                    "must have the mode 'auto' or 'required'", f"{where}.allowed_tools"
                )
            given = allowed.get("tools")
            if not isinstance(given, list) or not given:
                raise InvalidRequestError("must be a list of tools", f"{where}.allowed_tools.tools")
            names = (_name_in(tool, f"{where}.allowed_tools.tools") for tool in given)
            choice = cls(mode, tuple(dict.fromkeys(names)))
        elif value.get("type", "function") == "function":
            choice = cls("required", (_name_in(value, where),))
        else:
            raise InvalidRequestError("must be 'function' or 'allowed_tools'", f"{where}.type")
        known = {tool.name for tool in tools}
        for name in choice.names or ():
            if name not in known:
                raise InvalidRequestError(f"no tool has the name {name!r:.80}", where)
        if choice.mode == "required" and not tools:
            raise InvalidRequestError("asks for a call, but there are no tools", where)
        return choice

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that may be called."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if self.names is None or tool.name in self.names)


def _name_in(value: Any, where: str) -> str:
    if isinstance(value, Mapping):
        function = value.get("function", value)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise InvalidRequestError("must name a function", f"{where}.function.name")
