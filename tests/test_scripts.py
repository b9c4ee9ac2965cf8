"""What the scripts install: as the constraints have it, once, and again when these are renewed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Says what pip was asked for, compiles nothing, and is Python for everything else.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-m pip install"*) echo "$* | $PIP_CONSTRAINT | $PIP_BUILD_CONSTRAINT" >>pip.log ;;
    csrc/build.py*) ;;
    *) exec "{python}" "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository whose environment has been made."""
    root = tmp_path / "a clone"
    (root / "scripts").mkdir(parents=True)
    (root / ".venv" / "bin").mkdir(parents=True)
    for name in ("scripts/lib.sh", "scripts/constraints.txt", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root / name)
    python = root / ".venv" / "bin" / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    return root


def set_up(root: Path, extra: str = "test", **environment: str) -> list[str]:
    """What pip was asked for."""
    (root / "pip.log").write_text("")
    command = f"set -euo pipefail; source scripts/lib.sh; setup {extra}"
    kept = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "OCTAVO_BUILD_ISA")}
    subprocess.run(
        ["bash", "-c", command], cwd=root, check=True, capture_output=True, env=kept | environment
    )
    return (root / "pip.log").read_text().splitlines()


def test_everything_is_installed_by_the_constraints(checkout):
    (asked,) = set_up(checkout, "test,test-clients")
    arguments, at_run_time, to_build = asked.split(" | ")
    assert arguments.endswith("-e .[test,test-clients]")
    assert at_run_time == to_build == "scripts/constraints.txt"
    (asked,) = set_up(checkout, "transformers", PIP_CONSTRAINT="mine.txt")
    assert "| mine.txt scripts/constraints.txt |" in asked


def test_once_and_again_when_the_constraints_are_renewed(checkout):
    assert len(set_up(checkout)) == 1
    assert set_up(checkout) == []
    with (checkout / "scripts" / "constraints.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    assert len(set_up(checkout)) == 1
    assert set_up(checkout) == []
