"""The files of the page by address. Nothing else can be reached.

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
from octavo.page.layout_traces import layout_traces

STATIC = Path(__file__).with_name("static")
PAGES = {  # address: the file in STATIC
    "/": "chat/chat.html",
    "/engine": "engine/engine.html",
    "/pictures": "pictures/pictures.html",
    **{f"/docs/{name}": "docs/docs.html" for name in documents.paths()},
}
# Redirects, relative to the address.
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

# Directives of the page's Content-Security-Policy.
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
    """The answer at one address: its bytes and content type."""

    body: bytes
    content_type: str

    @classmethod
    def from_path(cls, path: Path) -> SiteFile:
        return cls(path.read_bytes(), _TYPES[path.suffix])


def site_files() -> dict[str, SiteFile]:
    """Return all static files by address; they are read here."""
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
    """True if this is the address of a page, rather than of a file that a page loads."""
    return address in PAGES or address in MOVED


def made_files() -> dict[str, Callable[[], SiteFile]]:
    """Return functions that make the generated files, by address; each takes about a second.

    They are the data of the pictures' formulas, and the traces that some pictures replay.
    """
    return {
        "/static/data.json": lambda: _json_file(page_data()),
        "/static/batching.json": lambda: _json_file(batching_traces()),
        "/static/layouts.json": lambda: _json_file(layout_traces()),
    }


def static_paths() -> list[Path]:
    """Return the scripts, styles, images and recorded runs in ``STATIC``."""
    suffixes = set(_TYPES) - {".html", ".md"}
    return sorted(path for path in STATIC.rglob("*") if path.suffix in suffixes)


def _json_file(content: Any) -> SiteFile:
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return SiteFile(text.encode(), _TYPES[".json"])


def policy_text(policy: dict[str, str]) -> str:
    """Return directives in the form of a header or a ``<meta>``."""
    return "; ".join(f"{name} {sources}" for name, sources in policy.items())
