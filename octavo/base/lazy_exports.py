"""Packages whose exported names import their modules only when they are first used (PEP 562).

The stub of such a package, ``__init__.pyi``, says which module each name is imported from, to type
checkers and to the package itself.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from octavo.base.renamed import renamed


def homes_of(package_file: str) -> dict[str, str]:
    """Return the homes (see `named`) of the names that a package exports by its stub.

    Args:
        package_file: the ``__init__.py`` beside the stub.
    """
    stub = ast.parse(Path(package_file).with_suffix(".pyi").read_bytes())
    return {
        name.asname or name.name: f"{node.module}:{name.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }


def named(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Return the object that a package exports as ``name``.

    Args:
        homes: of each name the module, and after a colon the object's name there.

    Raises:
        AttributeError: there is no such name.
        ImportError: a package that it needs is missing.
    """
    if name not in homes:
        return renamed(package, name)
    module, _, there = homes[name].partition(":")
    return getattr(import_module(module), there)
