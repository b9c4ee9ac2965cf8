"""``octavo ps``: the servers that run on this machine, and what their models are doing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from octavo.cli import terminal
from octavo.cli.flags import add_json_flag, add_value
from octavo.cli.server_client import ServerClient, ServerError
from octavo.server.running_servers import RunningServer, running_servers

EXAMPLES = """\
examples:
  octavo ps
  octavo ps --json
  octavo ps --url http://other-machine:8000        # OCTAVO_API_KEY, if it asks for a key
"""

_SECONDS = 5.0  # for a server to answer


def configure(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--url URL", "the server there, rather than those of this machine")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    servers = running_servers() if args.url is None else []
    found = [_described(server.url, server) for server in servers]
    if args.url is not None:
        found = [_described(args.url)]
        if found[0]["error"] is not None:
            raise ServerError(found[0]["error"])
    if args.json:
        terminal.print_json({"servers": found})
    elif not found:
        terminal.say("no server runs here: octavo serve starts one")
    else:
        head = ("URL", "MODEL", "STATE", "MEMORY", "REQUESTS", "UNLOADED IN", "PID", "SINCE")
        terminal.print_table(head, [row for server in found for row in _rows(server)])
    return 0


def _described(url: str, server: RunningServer | None = None) -> dict[str, Any]:
    """Return a server as JSON. ``error``: why its models are not known, if so."""
    document: dict[str, Any] = {
        "url": url,
        "pid": None if server is None else server.pid,
        "started": None if server is None else server.started,
        "models": [],
        "error": None,
    }
    try:
        listed = ServerClient(url, timeout=_SECONDS).get("/v1/models")
        document["models"] = [_model(each) for each in listed["data"]]
    except (ServerError, KeyError, TypeError, AttributeError) as error:
        is_said = isinstance(error, ServerError)
        document["error"] = str(error) if is_said else f"{url} does not list its models"
    return document


def _model(listed: dict[str, Any]) -> dict[str, Any]:
    """Return a model by what /v1/models says of it; the only one of a server has no status."""
    usual = "loading" if listed.get("max_model_len") is None else "loaded"
    memory = listed.get("memory_bytes") or {}
    return {
        "name": listed["id"],
        "state": (listed.get("status") or {}).get("value", usual),
        "memory_bytes": memory.get("total"),
        "num_requests": listed.get("num_requests"),
        "pinned": listed.get("pinned"),
        "unload_after": listed.get("unload_after"),
    }


def _rows(server: dict[str, Any]) -> Sequence[tuple[str, ...]]:
    since = "-" if server["started"] is None else _ago(time.time() - server["started"])
    last = (str(server["pid"] or "-"), since)
    if server["error"] is not None:
        return [(server["url"], "?", "unknown", "-", "-", "-", *last)]
    return [
        (
            server["url"],
            model["name"],
            model["state"] + (", pinned" if model["pinned"] else ""),
            _or_dash(model["memory_bytes"], terminal.format_bytes),
            _or_dash(model["num_requests"], str),
            _or_dash(model["unload_after"], lambda seconds: f"{seconds:.0f} s"),
            *last,
        )
        for model in server["models"]
    ]


def _or_dash(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
