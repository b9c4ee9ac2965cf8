"""Packages that are cheap to import: each of their names brings in what it needs when it is first
asked for (PEP 562)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from octavo.base.renamed import renamed


def named(package: str, homes: Mapping[str, str], name: str) -> Any:
    """What a package calls ``name``.

    Args:
        homes: for each name the module that has it, ``.module`` of the package's own; after a
            colon, what it is called there if that is something else.

    Raises:
        AttributeError: there is no such name. ImportError: what it needs is not there.
    """
    if name not in homes:
        return renamed(package, name)
    module, _, there = homes[name].partition(":")
    return getattr(import_module(module, package), there or name)
