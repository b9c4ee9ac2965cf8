"""Whose warnings fail a test, in runs of pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from own_warnings import ROOT, SUPPORT, errors, own_modules

STRANGER = """
import warnings

warnings.warn("on import", DeprecationWarning)

def old(stacklevel=2):
    warnings.warn("old is deprecated, call new", DeprecationWarning, stacklevel=stacklevel)

def within():
    old()
    old(stacklevel=1)
    open(__file__)

class Odd:
    def __del__(self):
        raise ValueError("a stranger's")
"""
TESTS = """
import gc, sys, threading, warnings
import pytest
{imports}

def test_it():
    {statement}
    for thread in threading.enumerate():  # one that is late would be seen after the test
        if thread is not threading.current_thread():
            thread.join()
    gc.collect()
"""


@pytest.fixture
def outcome(tmp_path: Path):
    """Runs a test with a statement, beside a stranger, under this repository's filters."""
    package = tmp_path / "others" / "stranger"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STRANGER)
    lines = "".join(f"    {line}\n" for line in ("default", *errors(tmp_path)))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nfilterwarnings =\n{lines}")

    def run(statement: str, imports: str = "import stranger", name: str = "tests") -> int:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "test_case.py").write_text(TESTS.format(statement=statement, imports=imports))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        surroundings = {**os.environ, "PYTHONPATH": f"{package.parent}:{ROOT}"}
        for plugin in ("schemathesis", "langsmith_plugin", "hypothesispytest", "rerunfailures"):
            command += ["-p", f"no:{plugin}"]
        done = subprocess.run(
            [*command, "--import-mode=importlib", str(folder)],
            cwd=tmp_path,
            env=surroundings,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode

    return run


@pytest.mark.thinned(1, most=2)
@pytest.mark.parametrize(
    "statement",
    [
        "pass",  # it warns when it is imported
        "stranger.within()",  # it calls what is deprecated, and leaves a file open
        "stranger.old(stacklevel=1)",  # says nothing of who called
        "stranger.Odd()",
        "threading.Thread(target=stranger.old, args=('x',)).start()",
    ],
)
def test_a_strangers_warning_fails_nothing(outcome, statement):
    assert outcome(statement) == 0


@pytest.mark.thinned(1, most=3)
@pytest.mark.parametrize(
    "statement",
    [
        "stranger.old()",  # the deprecated call is ours
        "warnings.warn('a test should not')",
        "open(__file__)",  # and nobody closes it
        "asyncio.sleep(1)",  # and nobody awaits it
        "threading.Thread(target=lambda: open(__file__)).start()",
        "threading.Thread(target=lambda: 1 / 0).start()",
    ],
)
def test_ours_does(outcome, statement):
    assert outcome(statement, "import asyncio, stranger") == 1


def test_what_octavo_itself_warns_of_does(outcome):
    """Its own module raises it, or is the one that called."""
    code = "exec(compile('{}', octavo.__file__, 'exec'), {{'__name__': 'octavo.some', **globals_}})"
    imports = "import octavo, stranger, warnings; globals_ = {'stranger': stranger, 'w': warnings}"
    assert outcome(code.format("stranger.old()"), imports) == 1
    assert outcome(code.format('w.warn("no")'), imports) == 1
    assert outcome(code.format("stranger.within()"), imports) == 0


def test_support_modules_are_ours():
    assert __name__ == "tests.test_own_warnings"
    pattern = re.compile(own_modules())
    names = [path.stem for path in SUPPORT.glob("*.py")]
    assert len(names) > 20 and all(map(pattern.match, names))
    for name in ("octavo", "octavo.core.engine", "tests.core.test_engine", "tests.conftest"):
        assert pattern.match(name)
    for name in ("octavo_else", "testsuite", "pydantic.main", "lanes_of"):
        assert not pattern.match(name)
