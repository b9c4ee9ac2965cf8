"""Which file of the page is served as what. Nothing else can be reached.

The page is written for the browser as it is: ES modules and style sheets in ``static``, a folder
for each part, and no build step. An address is looked up among those that are known from the start;
no part of it ever becomes a path.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.page import documents
from octavo.page.batching_traces import batching_traces
from octavo.page.data import page_data

STATIC = Path(__file__).with_name("static")
PAGES = {  # address: the file in STATIC
    "/": "chat/chat.html",
    "/engine": "engine/engine.html",
    "/pictures": "pictures/pictures.html",
    **{f"/docs/{name}": "docs/docs.html" for name in documents.paths()},
}
# Where another address leads, as seen from it.
MOVED = {"/docs": f"docs/{documents.NAMES[0]}", "/docs/": documents.NAMES[0]}

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
    ".md": "text/plain; charset=utf-8",
    ".json": "application/json",
}

# What a browser is told to refuse, as directives of a Content-Security-Policy.
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Text of a model can never become markup: the browser refuses innerHTML altogether.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


@dataclass(frozen=True, slots=True)
class SiteFile:
    """What is answered at one address."""

    body: bytes
    content_type: str

    @classmethod
    def from_path(cls, path: Path) -> SiteFile:
        return cls(path.read_bytes(), _TYPES[path.suffix])


def site_files() -> dict[str, SiteFile]:
    """Everything that is served as it lies there, by address; all of it is read here."""
    files = {address: SiteFile.from_path(STATIC / name) for address, name in PAGES.items()}
    for path in static_paths():
        files[f"/static/{path.relative_to(STATIC).as_posix()}"] = SiteFile.from_path(path)
    for name, path in documents.paths().items():
        files[f"/static/docs/{name}.md"] = SiteFile.from_path(path)
    for name, path in documents.image_paths().items():
        files[f"/static/docs/{name}"] = SiteFile.from_path(path)
    files["/static/docs.json"] = _json_file(documents.contents())
    return files


def is_page(address: str) -> bool:
    """Whether this is where somebody with a browser begins, rather than a part of a page."""
    return address in PAGES or address in MOVED


def made_files() -> dict[str, Callable[[], SiteFile]]:
    """How the others are made, by address, which takes about a second each: what pictures compute
    from, and what some of them replay."""
    return {
        "/static/data.json": lambda: _json_file(page_data()),
        "/static/batching.json": lambda: _json_file(batching_traces()),
    }


def static_paths() -> list[Path]:
    """The scripts, styles, images and recorded runs in ``STATIC``."""
    suffixes = set(_TYPES) - {".html", ".md"}
    return sorted(path for path in STATIC.rglob("*") if path.suffix in suffixes)


def _json_file(content: Any) -> SiteFile:
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return SiteFile(text.encode(), _TYPES[".json"])


def policy_text(policy: dict[str, str]) -> str:
    """Directives as a header, or a ``<meta>``, has them."""
    return "; ".join(f"{name} {sources}" for name, sources in policy.items())
