"""Packages whose exported names import their modules only when they are first used (PEP 562)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from octavo.base.renamed import renamed


def named(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Return the object that a package exports as ``name``.

    Args:
        homes: the module of each name, ``.module`` in the package itself; after a colon, the
            object's name there if it differs.

    Raises:
        AttributeError: there is no such name.
        ImportError: a package that it needs is missing.
    """
    if name not in homes:
        return renamed(package, name)
    module, _, there = homes[name].partition(":")
    return getattr(import_module(module, package), there or name)
