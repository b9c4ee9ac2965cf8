"""The chat page at ``/``: a handful of files, read once, that call the API beside them.

The page is written for the browser as it is: no build step, nothing from other hosts, no inline
script or style. Its policy says so to the browser, and allows nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

from octavo.server.api.service import Service

STATIC = Path(__file__).with_name("static")

_SCRIPT = "text/javascript; charset=utf-8"
# What is served, and as what. Nothing else in the folder can be reached.
CONTENT_TYPES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
    "/static/favicon.svg": ("favicon.svg", "image/svg+xml"),
    "/static/app.js": ("app.js", _SCRIPT),
    "/static/api.js": ("api.js", _SCRIPT),
    "/static/clipboard.js": ("clipboard.js", _SCRIPT),
    "/static/follower.js": ("follower.js", _SCRIPT),
    "/static/markdown.js": ("markdown.js", _SCRIPT),
    "/static/settings.js": ("settings.js", _SCRIPT),
    "/static/sse.js": ("sse.js", _SCRIPT),
    "/static/stats.js": ("stats.js", _SCRIPT),
    "/static/turn.js": ("turn.js", _SCRIPT),
}

SECURITY_HEADERS = {  # beside those of the gate
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Text of a model can never become markup: the browser refuses innerHTML altogether.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, with the headers that every answer about it has."""

    body: bytes
    headers: dict[str, str]

    @classmethod
    def from_path(cls, path: Path, content_type: str) -> PageFile:
        body = path.read_bytes()
        headers = {
            **SECURITY_HEADERS,
            "Content-Type": content_type,
            # Ask each time, so that an upgraded server is never met by an old page.
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        }
        return cls(body, headers)

    def is_known(self, if_none_match: str | None) -> bool:
        """Whether the browser's copy, by its ``If-None-Match``, is this very file."""
        if if_none_match is None:
            return False
        tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        return "*" in tags or self.headers["ETag"] in tags


def create_router(service: Service) -> APIRouter:
    """The page's routes. All files are read here, and none later.

    ``service`` is not needed: what the page shows of it, it asks the API for.
    """
    router = APIRouter(include_in_schema=False)
    for path, (name, content_type) in CONTENT_TYPES.items():
        endpoint = _endpoint(PageFile.from_path(STATIC / name, content_type))
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], name=f"page:{name}")
    return router


def _endpoint(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if file.is_known(request.headers.get("if-none-match")):
            return Response(status_code=304, headers=file.headers)
        if request.method == "HEAD":
            return Response(headers={**file.headers, "Content-Length": str(len(file.body))})
        return Response(file.body, headers=file.headers)

    return endpoint
