"""Tools of ``octavo chat``: opened as its flags say, and called when the user agrees."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from octavo.agents.tool_loop import DEFAULT_MAX_TURNS
from octavo.agents.toolbox import RunnableTool, Toolbox, ToolResult
from octavo.chat_formats.messages import ToolCall
from octavo.cli import UsageError, terminal
from octavo.cli.flags import Parser, add_number, add_switch, add_value

_MOST_SHOWN = 400  # characters of a result; the model gets all of it
_MCP = "mcp:"


def add_tool_flags(parser: Parser) -> None:
    """Add the flags that give the model tools."""
    add_value(
        parser,
        "--tools FILE.py|mcp:COMMAND",
        "functions of a Python file, which is run, or an MCP server that COMMAND starts, as tools "
        "that the model may call; may be repeated",
        action="append",
        default=[],
    )
    add_switch(parser, "--yes", "make calls of tools without asking")
    add_number(
        parser, "--max-tool-turns", "answers to one message that may call tools", DEFAULT_MAX_TURNS
    )


@contextmanager
def open_toolbox(args: argparse.Namespace) -> Iterator[Toolbox]:
    """The tools of the flags; MCP servers run as long as they are in use.

    Raises:
        UsageError: calls would have to be confirmed, and stdin is no terminal.
        ConfigError: a file or a server cannot be used.
    """
    if args.tools and not args.yes and not sys.stdin.isatty():
        raise UsageError("--tools: calls are confirmed on a terminal, which stdin is not: --yes")
    with ExitStack() as servers:
        tools: list[RunnableTool] = []
        for source in args.tools:
            if source.startswith(_MCP):
                from octavo.agents.mcp_tools import MCPServer

                server = MCPServer(source.removeprefix(_MCP))
                servers.callback(server.close)
                tools += server.tools
            else:
                from octavo.agents.python_tools import tools_of_file

                tools += tools_of_file(Path(source).expanduser())
        yield Toolbox(tools)


class Calls:
    """Shows calls and their results on stderr, and asks whether a call may be made."""

    def __init__(self, *, asks: bool):
        self._asks = asks
        self._always: set[str] = set()

    def allows(self, call: ToolCall) -> bool:
        """Show a call; return whether the user agrees to it, or has to all calls of this tool."""
        terminal.say(f"-> {visible(call.name)}({visible(_compact(call.arguments))})")
        if not self._asks or call.name in self._always:
            return True
        while True:
            try:
                said = input("   make this call? [y]es, [n]o, [a]lways for this tool: ")
            except EOFError:
                return False
            said = said.strip().lower()
            if said in ("a", "always"):
                self._always.add(call.name)
            if said in ("y", "yes", "a", "always"):
                return True
            if said in ("n", "no"):
                return False

    def show(self, call: ToolCall, result: ToolResult) -> None:
        """Show what a call came to, on one line."""
        text = result.text
        if len(text) > _MOST_SHOWN:
            text = f"{text[:_MOST_SHOWN]}… ({len(result.text):,} characters)"
        terminal.say(f"<- {visible(text)}")


def visible(text: str) -> str:
    """Return text with all that does not print, or changes how other text is shown, escaped.

    What a user agrees to must be what is called.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _compact(arguments: str) -> str:
    """Return arguments as they are understood: where a name comes twice, the last one counts."""
    try:
        return json.dumps(json.loads(arguments or "{}"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
