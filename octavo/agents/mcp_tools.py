"""Tools of an MCP server, a program that is started and spoken to over its standard input and
output, with the package ``mcp`` (``pip install 'octavo[mcp]'``)."""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.base.errors import ConfigError, InvalidRequestError, OctavoError, ToolError
from octavo.base.optional_deps import need_mcp
from octavo.chat_formats.tools import Tool

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

T = TypeVar("T")

_START_SECONDS = 120  # some commands fetch the server when it is started for the first time


class MCPServer:
    """A running server. It has an event loop in a thread of its own, and ends with `close`.

    Args:
        command: the program with its arguments, split as a shell splits them but not run by one. It
            gets few variables of the environment: ``env NAME=VALUE PROGRAM`` sets others.

    Raises:
        MissingPackageError: the package ``mcp`` is not installed.
        ConfigError: the command cannot be run, or does not speak MCP.
    """

    def __init__(self, command: str):
        need_mcp(f"mcp:{command}")
        self._command = command
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"mcp:{command}: {error}") from None
        if not self._words:
            raise ConfigError("mcp: needs a command that starts a server, as mcp:COMMAND")
        self._loop = asyncio.new_event_loop()
        self._ready: Future[list[Any]] = Future()
        self._is_closed = asyncio.Event()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="MCP server", daemon=True)
        self._thread.start()
        try:
            offered = self._ready.result(_START_SECONDS)
            self.tools = [MCPTool(self, self._tool(each)) for each in offered]
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise ConfigError(
                    f"mcp:{command}: no answer within {_START_SECONDS} seconds"
                ) from None
            raise

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Have a tool called, and wait for it.

        Raises:
            ToolError: the server refused, or has ended.
        """
        return self._wait_for(self._client.call_tool(name, dict(arguments)))

    def close(self) -> None:
        """End the server. May be repeated."""
        with suppress(RuntimeError):  # its loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _tool(self, offered: Any) -> Tool:
        declared = {
            "name": offered.name,
            "description": offered.description or offered.title,
            "parameters": offered.input_schema,
        }
        try:
            return Tool.of(declared, offered.name)
        except InvalidRequestError as error:
            raise ConfigError(f"mcp:{self._command}: a tool cannot be used: {error}") from error

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except KeyboardInterrupt:
            running.cancel()
            raise
        except Exception as error:
            raise ToolError(_reason(error)) from error

    # -- in the thread of the event loop ----------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except (Exception, asyncio.CancelledError) as error:
            if not self._ready.done():
                message = f"mcp:{self._command}: {_reason(error)}"
                self._ready.set_exception(ConfigError(message))
        finally:
            self._loop.close()

    def _stop(self) -> None:
        self._is_closed.set()
        if not self._ready.done():
            self._serving.cancel()

    async def _serve(self) -> None:
        from mcp import Client, StdioServerParameters

        program, *arguments = self._words
        async with Client(StdioServerParameters(command=program, args=arguments)) as self._client:
            self._ready.set_result(await _tools_of(self._client))
            await self._is_closed.wait()


class MCPTool:
    """A tool of a server."""

    def __init__(self, server: MCPServer, tool: Tool):
        self._server = server
        self.tool = tool

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Have the server call it.

        Raises:
            ToolError: the tool says that it failed, or the server does.
        """
        result = self._server.call(self.tool.name, arguments)
        text = "\n".join(map(_text_of, result.content))
        if result.is_error:
            raise ToolError(text or "the tool failed, and does not say why")
        return text


async def _tools_of(client: Client) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _text_of(block: Any) -> str:
    """Return a part of a result as text: models here read nothing else."""
    if block.type == "text":
        return str(block.text)
    text = getattr(getattr(block, "resource", None), "text", None)
    if isinstance(text, str):
        return text
    return f"[{block.type}, which cannot be shown to this model]"


def _reason(error: BaseException) -> str:
    """Return the message of the first error within groups of such, which task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    known = isinstance(error, OctavoError | OSError) and str(error)
    return known or f"{type(error).__name__}: {error}"
