"""Which warnings fail a test: those that octavo's own code raises or causes, and no stranger's.

A warning belongs to the module that it is attributed to: the one that raises it, or, for what is
deprecated, the one that its ``stacklevel`` names, which is the caller. Where that is octavo or one
of its tests, it is an error. What other packages do among themselves is shown at the end of a run,
and fails nothing: a new release of somebody else's must not.

Python itself warns of what is left behind (a file that nobody closed, a coroutine that nobody
awaited) in whatever module the processor happens to be, often its own: there it is an error, too,
and so is what cannot be raised, in a destructor or a thread, if octavo's code is in its traceback.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
# The names that modules of this repository have in warnings: those of tests are their paths.
FOLDERS = ("octavo", "tests", "benchmarks", "examples", "csrc")


def own_modules() -> str:
    """A pattern of the names of octavo's modules, its tests' and what these share."""
    shared = (path.stem for path in (*SUPPORT.glob("*.py"), *ROOT.glob("*/conftest.py")))
    return _names([*FOLDERS, "conftest", *shared])


def errors(root: Path = ROOT) -> Iterator[str]:
    """Lines of pytest's ``filterwarnings``, for a repository in ``root``."""
    own, python = own_modules(), _names(sys.stdlib_module_names)
    yield f"error:::{own}"
    for module in (own, python):
        yield f"error::ResourceWarning:{module}"
        yield f"error:coroutine .* was never awaited:RuntimeWarning:{module}"
    for message in (
        "Test functions should return None",
        r"Unknown pytest\.",
        "cannot collect test",
    ):
        yield f"error:{message}"  # pytest says it, of tests of ours
    places = "|".join(re.escape(str(root / folder)) for folder in FOLDERS)
    ours = rf"(?s).*({places}|ResourceWarning|was never awaited)".replace(":", r"\x3a")
    yield f"error:{ours}:pytest.PytestUnraisableExceptionWarning"
    yield f"error:{ours}:pytest.PytestUnhandledThreadExceptionWarning"


def _names(names: Iterable[str]) -> str:
    return rf"({'|'.join(sorted(set(names)))})(\.|$)"  # no colon: these part the fields of a line


def pytest_configure(config: pytest.Config) -> None:
    for line in errors():
        config.addinivalue_line("filterwarnings", line)
