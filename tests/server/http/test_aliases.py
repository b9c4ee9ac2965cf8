"""Routes under other addresses: whatever holds for a path holds for its aliases."""

from __future__ import annotations

import asyncio

import pytest

from octavo.server.http.aliases import ALIASES, Aliases


def seen(raw_path: bytes, path: str | None = None, kind: str = "http") -> tuple[str, bytes]:
    scopes = []

    async def app(scope, receive, send):
        scopes.append(scope)

    scope = {"type": kind, "path": raw_path.decode() if path is None else path}
    scope["raw_path"] = raw_path
    asyncio.run(Aliases(app)(scope, None, None))
    (scope,) = scopes
    return scope["path"], scope["raw_path"]


@pytest.mark.parametrize(("alias", "path"), ALIASES.items())
def test_an_alias_is_its_path(alias, path):
    assert seen(alias.encode()) == (path, path.encode())
    assert seen(path.encode()) == (path, path.encode())


def test_a_model_below_the_list_moves_along():
    assert seen(b"/models/a/b") == ("/v1/models/a/b", b"/v1/models/a/b")
    assert seen(b"/models/a%20b", "/models/a b") == ("/v1/models/a b", b"/v1/models/a%20b")


@pytest.mark.parametrize(
    "path", [b"/", b"/modelsx", b"/completions/", b"/chat", b"/v1/healthy", b"/v1/health/x"]
)
def test_other_paths_stay(path):
    assert seen(path) == (path.decode(), path)


def test_an_encoded_spelling_is_no_alias():
    assert seen(b"/%63ompletions", "/completions") == ("/completions", b"/%63ompletions")
    assert seen(b"/completions", kind="websocket") == ("/completions", b"/completions")
