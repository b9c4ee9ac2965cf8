"""The page's routes: files that are read once, and call the API beside them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache

from fastapi import APIRouter, Request, Response

from octavo.page import site
from octavo.server.api.service import Service

SECURITY_HEADERS = {  # beside those of the gate
    "Content-Security-Policy": site.policy_text(site.POLICY),
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
    def from_site(cls, file: site.SiteFile) -> PageFile:
        headers = {
            **SECURITY_HEADERS,
            "Content-Type": file.content_type,
            # Ask each time, so that an upgraded server is never met by an old page.
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(file.body).hexdigest()[:32]}"',
        }
        return cls(file.body, headers)

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
    for address, file in site.site_files().items():
        _add(router, address, _ready(PageFile.from_site(file)))
    _add(router, "/static/data.json", _made(site.data_file))
    return router


def _add(router: APIRouter, address: str, find: Callable[[], Awaitable[PageFile]]) -> None:
    async def endpoint(request: Request) -> Response:
        file = await find()
        if file.is_known(request.headers.get("if-none-match")):
            return Response(status_code=304, headers=file.headers)
        if request.method == "HEAD":
            return Response(headers={**file.headers, "Content-Length": str(len(file.body))})
        return Response(file.body, headers=file.headers)

    router.add_api_route(address, endpoint, methods=["GET", "HEAD"], name=f"page:{address}")


def _ready(file: PageFile) -> Callable[[], Awaitable[PageFile]]:
    async def find() -> PageFile:
        return file

    return find


def _made(make: Callable[[], site.SiteFile]) -> Callable[[], Awaitable[PageFile]]:
    """Made when somebody first asks, beside what the server does meanwhile."""
    file = cache(lambda: PageFile.from_site(make()))

    async def find() -> PageFile:
        return await asyncio.to_thread(file)

    return find
