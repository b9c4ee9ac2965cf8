"""Write the pictures and documents as a folder that a browser opens from disk, without a server.

From disk a browser runs no modules and fetches no files. So the modules are joined into one script
(script_bundle.py), and the files that they would fetch into another, which runs first. There is no
engine to talk to: the chat and the dashboard are left out."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.base.files import NewFolder
from octavo.page import documents, site
from octavo.page.recorded_deployments import recorded_deployments
from octavo.page.script_bundle import join_modules

# The pages of a folder, by the files that they are made of. A browser opens the first by itself.
_PAGES = {"index.html": "pictures/pictures.html", "docs.html": "docs/docs.html"}
_ENTRIES = re.compile(r'<script type="module" src="[^"]*static/([^"]+)"></script>')
_STYLES = re.compile(r'(<link rel="(?:icon|stylesheet)"[^>]*href=")[^"]*static/([^"]+)(")')
_SCRIPTS = (
    r'<script src="data.js" defer></script>'
    "\n  "
    r'<script src="page.js" data-entry="\1" defer></script>'
)
# Directives that only a header may have; a browser complains of them in a page.
_OF_HEADERS = {"frame-ancestors"}


def write_static_folder(out: str | Path) -> list[Path]:
    """Write the folder, as a whole or not at all. Return its files.

    Raises:
        ConfigError: ``out`` is a file, or a folder that is not empty.
        OSError: it cannot be written.
    """
    path = Path(out)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists already: give a folder that is new, or empty")
    with NewFolder(out) as new:
        for name, content in _contents().items():
            file = new.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        new.publish()
    return sorted(file for file in path.rglob("*") if file.is_file())


def _contents() -> dict[str, bytes]:
    """Return the files by name."""
    entries = set()
    contents: dict[str, bytes] = {}
    for name, page in _PAGES.items():
        source = (site.STATIC / page).read_text("utf-8")
        contents[name] = _page(source).encode()
        entries.update(_ENTRIES.findall(source))
        for style in _STYLES.findall(source):
            contents[style[1]] = (site.STATIC / style[1]).read_bytes()
    for name, path in documents.image_paths().items():
        contents[f"docs/{name}"] = path.read_bytes()
    contents["page.js"] = join_modules(_modules_of(entries)).encode()
    contents["data.js"] = _data_script().encode()
    return contents


def _page(source: str) -> str:
    """Return a page with its policy, scripts and styles as they are in the folder."""
    policy = {name: value for name, value in site.POLICY.items() if name not in _OF_HEADERS}
    text = html.escape(site.policy_text(policy), quote=True)
    meta = f'<meta charset="utf-8">\n  <meta http-equiv="Content-Security-Policy" content="{text}">'
    page = source.replace('<meta charset="utf-8">', meta)
    page = re.sub(r'data-base="[^"]*"', 'data-base="."', page)
    page = _STYLES.sub(r"\1\2\3", page)
    return _ENTRIES.sub(_SCRIPTS, page)


def _modules_of(entries: set[str]) -> dict[str, str]:
    """Return the entries and all that they import, by path below ``static``."""
    found: dict[str, str] = {}
    waiting = sorted(entries)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = (site.STATIC / path).read_text("utf-8")
        for target in re.findall(r'from "(\.[^"]+)";$', found[path], re.M):
            absolute = (site.STATIC / path).parent / target
            waiting.append(absolute.resolve().relative_to(site.STATIC.resolve()).as_posix())
    return found


def _data_script() -> str:
    """Return a script with the files that pages fetch, as texts by their paths below
    ``static/``."""
    files = site.site_files()
    files |= {address: make() for address, make in site.made_files().items()}
    texts = {
        address.removeprefix("/static/"): file.body.decode()
        for address, file in files.items()
        if address.endswith((".json", ".md"))
    }
    texts["deployments.json"] = json.dumps(recorded_deployments(), separators=(",", ":"))
    return f"globalThis.octavoFiles = {json.dumps(texts, ensure_ascii=False)};\n"
