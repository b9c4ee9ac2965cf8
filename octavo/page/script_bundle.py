"""Join the page's modules into one classic script, as browsers do not run modules from disk.

Each module becomes a function of ``ask``, which returns the exports of another one; a module is run
when it is first asked for, so that a page runs its own entry and what that needs. Only the few
forms that the modules are written in are known here; anything else is an error:

    import { a, b as c } from "./x.js";      import * as all from "./x.js";
    export { a, b } from "./x.js";           export const|let|function|async function|class a …

Names are bound once a module has run: a variable exported as ``let`` must not change later.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from octavo.base.errors import ConfigError

_NAMES = r"\{([^{}]*)\}"
_FROM = r'\s+from\s+"(\.{1,2}/[\w./-]+)";'
_IMPORT = re.compile(rf"^import\s+(?:{_NAMES}|\*\s+as\s+(\w+)){_FROM}$", re.M)
_REEXPORT = re.compile(rf"^export\s+{_NAMES}{_FROM}$", re.M)
_EXPORT = re.compile(r"^export\s+(?=(?:const|let|class|(?:async\s+)?function\*?)\s+(\w+))", re.M)
_UNKNOWN = re.compile(
    r"^(?:import|export)\b.*$|\bimport\s*\(|\bimport\.meta\b"
    r"|^(?:const|let|class|(?:async\s+)?function)\s+ask\b",  # what each module is handed
    re.M,
)

_SCRIPT = """\
"use strict";
(() => {
  const modules = {
%s
  };
  const known = {};
  const ask = (name) => (known[name] ??= modules[name](ask));
  ask(document.currentScript.dataset.entry);
})();
"""


def join_modules(sources: Mapping[str, str]) -> str:
    """Return one script of modules by path; it runs the one that its element's ``data-entry``
    names.

    Raises:
        ConfigError: a module has a form that is not known here, asks for a missing module, or
            modules ask for each other.
    """
    joined = {path: _Module(path, source, set(sources)) for path, source in sources.items()}
    try:
        TopologicalSorter({path: module.asks for path, module in joined.items()}).prepare()
    except CycleError as error:
        raise ConfigError(f"modules ask for each other: {' -> '.join(error.args[1])}") from None
    return _SCRIPT % "\n".join(module.as_property() for module in joined.values())


class _Module:
    def __init__(self, path: str, source: str, known: set[str]):
        self.path = path
        self.asks: set[str] = set()
        self._known = known
        self._exports: list[str] = []  # as properties of an object
        body = _IMPORT.sub(self._import, source)
        body = _REEXPORT.sub(self._reexport, body)
        self._body = _EXPORT.sub(self._export, body)
        if unknown := _UNKNOWN.search(self._body):
            raise ConfigError(f"{path}: the bundle cannot hold this form: {unknown.group()}")

    def as_property(self) -> str:
        exports = f"return {{ {', '.join(self._exports)} }};"
        return f"{json.dumps(self.path)}: (ask) => {{\n{self._body}\n{exports}\n}},"

    def _import(self, found: re.Match[str]) -> str:
        names, everything, path = found.groups()
        into = everything or f"{{ {', '.join(_renamed(names))} }}"
        return f"const {into} = ask({json.dumps(self._resolve(path))});"

    def _reexport(self, found: re.Match[str]) -> str:
        names, path = found.groups()
        target = json.dumps(self._resolve(path))
        for pair in _renamed(names):
            name, _, other = pair.partition(": ")
            self._exports.append(f"{other or name}: ask({target}).{name}")
        return ""

    def _export(self, found: re.Match[str]) -> str:
        self._exports.append(found.group(1))
        return ""

    def _resolve(self, path: str) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(self.path), path))
        if target not in self._known:
            raise ConfigError(f"{self.path} asks for {target}, which is not there")
        self.asks.add(target)
        return target


def _renamed(names: str) -> list[str]:
    """Return the names of ``a, b as c`` as an object pattern has them: ``a``, ``b: c``."""
    parts = [name.strip() for name in names.split(",") if name.strip()]
    return [re.sub(r"\s+as\s+", ": ", part) for part in parts]
