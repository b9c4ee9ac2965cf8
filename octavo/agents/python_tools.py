"""Tools that are the functions of a Python file.

The file is run as it is, as ``python FILE.py`` would run it: only trusted files may be named.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from octavo.base.errors import ConfigError, InvalidRequestError, ToolError
from octavo.chat_formats.tools import Tool


class PythonTool:
    """A function, which may be ``async``, as a tool.

    Its name and docstring are the tool's; pydantic makes the schema of its parameters from the type
    hints, and checks and converts arguments by these.

    Raises:
        ConfigError: the function cannot be called with named arguments of JSON.
    """

    def __init__(self, function: Callable[..., Any]):
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
            schema = adapter.json_schema(schema_generator=_Schema)
            self._checked = validate_call(function)
            if schema.get("type") != "object":
                raise ConfigError("its parameters must have names")
            declared = {
                "name": function.__name__,
                "description": inspect.getdoc(function),
                "parameters": schema,
            }
            self.tool = Tool.of(declared, function.__name__)
        except (PydanticUserError, ConfigError, InvalidRequestError, NameError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{function.__name__} cannot be a tool: {reason}") from error

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the function.

        Returns:
            What it returns if that is text; else that as JSON.

        Raises:
            ToolError: the arguments do not fit, or it raised an exception.
        """
        try:
            value = self._checked(**arguments)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            return value if isinstance(value, str) else to_json(value, fallback=str).decode()
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)
            raise ToolError("; ".join(map(_problem, problems))) from error
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error


class _Schema(GenerateJsonSchema):
    """Leaves out titles, which repeat the names of parameters in every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _problem(found: Any) -> str:
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


def tools_of_file(path: Path) -> list[PythonTool]:
    """Run a Python file, and return its functions as tools: those that ``__all__`` names, or else
    the ones that it defines whose names do not begin with ``_``.

    Raises:
        ConfigError: the file cannot be read or fails, has no such function, or one that cannot be a
            tool.
    """
    module = _run(path)
    functions = _functions(module, path)
    if not functions:
        raise ConfigError(f"{path} has no function that could be a tool")
    try:
        return [PythonTool(function) for function in functions]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    name = str(path.resolve())  # which no other module has
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file: its name should end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where type hints that are text are looked up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} fails: {type(error).__name__}: {error}") from error
    return module


def _functions(module: ModuleType, path: Path) -> list[Callable[..., Any]]:
    names = getattr(module, "__all__", None)
    if names is None:
        return [
            value
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__name__ == name
            and value.__module__ == module.__name__
            and not name.startswith("_")
        ]
    for name in names:
        if not inspect.isfunction(getattr(module, name, None)):
            raise ConfigError(f"{path}: __all__ names {name!r}, which is no function")
    return [getattr(module, name) for name in names]
