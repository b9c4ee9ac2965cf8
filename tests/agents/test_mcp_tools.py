from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.agents import mcp_tools
from octavo.agents.mcp_tools import MCPServer
from octavo.base import optional_deps
from octavo.base.errors import ConfigError, MissingPackageError, ToolError

SERVER = '''
import os
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent

server = MCPServer("weather")

@server.tool()
def weather(city: str, days: int = 1) -> str:
    """Return the weather of a city."""
    return f"{city}: fine for {days} days"

@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no wind")

@server.tool()
def picture() -> list:
    """Return a text and a picture."""
    image = ImageContent(type="image", data="AAAA", mime_type="image/png")
    return [TextContent(type="text", text="a cloud"), image]

@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)

server.run("stdio")
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("mcp")
    path = tmp_path_factory.mktemp("mcp") / "weather server.py"
    path.write_text(SERVER)
    python_path = shlex.quote(":".join(sys.path))
    return f"env PYTHONPATH={python_path} {sys.executable} {shlex.quote(str(path))}"


@pytest.fixture
def server(command: str) -> Iterator[MCPServer]:
    server = MCPServer(command)
    yield server
    server.close()


def test_tools_of_a_server(server: MCPServer) -> None:
    known = {each.tool.name: each for each in server.tools}
    assert set(known) == {"weather", "fail", "picture", "die"}
    tool = known["weather"].tool
    assert tool.description == "Return the weather of a city."
    assert tool.parameters["required"] == ["city"]
    assert known["weather"].run({"city": "Paris"}) == "Paris: fine for 1 days"
    with pytest.raises(ToolError, match="no wind"):
        known["fail"].run({})
    with pytest.raises(ToolError, match="city"):
        known["weather"].run({})
    assert known["picture"].run({}) == "a cloud\n[image, which cannot be shown to this model]"
    with pytest.raises(ToolError):
        known["die"].run({})
    with pytest.raises(ToolError):  # nor does a later call wait for it
        known["weather"].run({"city": "Paris"})


def test_closing_ends_the_server(server: MCPServer) -> None:
    server.close()
    server.close()
    assert not server._thread.is_alive()


def test_programs_that_speak_no_mcp(command: str, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="mcp:/no/such/program: .*No such file"):
        MCPServer("/no/such/program")
    with pytest.raises(ConfigError, match=f"mcp:{sys.executable} -c 0: "):
        MCPServer(f"{sys.executable} -c 0")
    with pytest.raises(ConfigError, match="mcp: needs a command"):
        MCPServer("  ")
    with pytest.raises(ConfigError, match="No closing quotation"):
        MCPServer("server 'x")
    monkeypatch.setattr(mcp_tools, "_START_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="no answer within"):
        MCPServer(f"{sys.executable} -c 'import sys; sys.stdin.read()'")


def test_the_package_is_named_that_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(optional_deps.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'octavo\[mcp\]'"):
        MCPServer("server")
