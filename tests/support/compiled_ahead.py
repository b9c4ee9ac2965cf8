"""Processes that run tests side by side share the compiling of what all of them import.

Each imports every module of tests, in the same order, and would compile all of them itself where
none is compiled yet, as in a fresh checkout: pytest rewrites assertions, which takes 0.05 s a
module, and processes that do the same at the same pace find nothing done by another. So each
first compiles its share, and writes it where all look.
"""

from __future__ import annotations

import importlib.util
import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    given = getattr(session.config, "workerinput", None)
    if given is None or sys.dont_write_bytecode:
        return
    number, count = int(given["workerid"].removeprefix("gw")), given["workercount"]
    for file in sorted(tests(session.config))[number::count]:
        rewrite(file, session.config)
    for file in sorted(Path(octavo.__file__).parent.rglob("*.py"))[number::count]:
        compiled = Path(importlib.util.cache_from_source(str(file)))
        if not is_newer(compiled, file):
            py_compile.compile(str(file), quiet=2)


def tests(config: pytest.Config) -> Iterator[Path]:
    """Files that are going to be collected."""
    for argument in config.args:
        path = Path(argument.partition("::")[0])
        found = [path] if path.is_file() else path.rglob("*.py")
        yield from (file for file in found if file.name.startswith(("test_", "conftest.")))


def is_newer(compiled: Path, source: Path) -> bool:
    return compiled.exists() and compiled.stat().st_mtime > source.stat().st_mtime


def rewrite(file: Path, config: pytest.Config) -> None:
    """Leave in the cache what pytest's import hook looks for there. It has no function of its own
    for that; another version of pytest may do it itself, by other names."""
    from _pytest.assertion import rewrite as hook

    try:
        compiled = hook.get_cache_dir(file.absolute()) / f"{file.stem}{hook.PYC_TAIL}"
        if is_newer(compiled, file):
            return
        source_hash, code = hook._rewrite_test(file.absolute(), config)
        if hook.try_makedirs(compiled.parent):
            hook._write_pyc(config.stash[hook.assertstate_key], code, source_hash, compiled)
    except (AttributeError, TypeError, ValueError, SyntaxError):
        return
