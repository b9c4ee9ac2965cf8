"""The page's routes, which serve static files that are read once."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache

from fastapi import APIRouter, Request, Response

from octavo.page import site
from octavo.server.api.server_context import ServerContext

SECURITY_HEADERS = {  # beside those of `AccessControl`
    "Content-Security-Policy": site.policy_text(site.POLICY),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, with the headers of every answer about it."""

    body: bytes
    headers: dict[str, str]

    @classmethod
    def from_site(cls, file: site.SiteFile, *, packed: bool = False) -> PageFile:
        """Return the file as it is, or ``packed`` for clients that take gzip: a third or less for
        texts."""
        body = gzip.compress(file.body, mtime=0) if packed else file.body
        headers = {
            **SECURITY_HEADERS,
            **({"Content-Encoding": "gzip"} if packed else {}),
            "Content-Type": file.content_type,
            "Vary": "Accept-Encoding",
            # Ask each time, so that an upgraded server is never met by an old page.
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        }
        return cls(body, headers)

    def is_known(self, if_none_match: str | None) -> bool:
        """True if the browser's copy, by its ``If-None-Match``, is this very file."""
        if if_none_match is None:
            return False
        tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        return "*" in tags or self.headers["ETag"] in tags


def create_router(server: ServerContext) -> APIRouter:
    """Return the page's routes. All files are read here; those that are generated are made when
    first asked for.

    ``server`` is not used: the page asks the API for everything that it shows.
    """
    router = APIRouter(include_in_schema=False)
    for address, file in site.site_files().items():
        _add(router, address, _ready(PackedFile.from_site(file)))
    for address, make in site.made_files().items():
        _add(router, address, _made(make))
    for address, target in site.MOVED.items():
        _add_moved(router, address, target)
    return router


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file as it is, and packed where that makes it smaller, which is not so for images."""

    plain: PageFile
    packed: PageFile

    @classmethod
    def from_site(cls, file: site.SiteFile) -> PackedFile:
        plain = PageFile.from_site(file)
        if file.content_type == "image/webp":  # it is compressed; gzip saves half a percent at best
            return cls(plain, plain)
        packed = PageFile.from_site(file, packed=True)
        return cls(plain, packed if len(packed.body) < len(plain.body) else plain)

    def of(self, request: Request) -> PageFile:
        """Return the form that the client accepts."""
        takes = request.headers.get("accept-encoding", "").replace(" ", "").split(",")
        return self.packed if {"gzip", "gzip;q=1.0"} & set(takes) else self.plain


def _add(router: APIRouter, address: str, find: Callable[[], Awaitable[PackedFile]]) -> None:
    async def endpoint(request: Request) -> Response:
        file = (await find()).of(request)
        if file.is_known(request.headers.get("if-none-match")):
            return Response(status_code=304, headers=file.headers)
        if request.method == "HEAD":
            return Response(headers={**file.headers, "Content-Length": str(len(file.body))})
        return Response(file.body, headers=file.headers)

    router.add_api_route(address, endpoint, methods=["GET", "HEAD"], name=f"page:{address}")


def _add_moved(router: APIRouter, address: str, target: str) -> None:
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache", "Location": target}

    async def endpoint() -> Response:
        return Response(status_code=307, headers=headers)

    router.add_api_route(address, endpoint, methods=["GET", "HEAD"], name=f"page:{address}")


def _ready(file: PackedFile) -> Callable[[], Awaitable[PackedFile]]:
    async def find() -> PackedFile:
        return file

    return find


def _made(make: Callable[[], site.SiteFile]) -> Callable[[], Awaitable[PackedFile]]:
    """Return a function that makes the file when it is first asked for, in a thread."""
    file = cache(lambda: PackedFile.from_site(make()))

    async def find() -> PackedFile:
        return await asyncio.to_thread(file)

    return find
