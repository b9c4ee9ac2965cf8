"""What the documentation tells people to type is a command line (test_documented_commands.py runs
it), and names what is there."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from documented import documented_commands

from octavo import cli

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("demo", "test", "check", "bench", "lock")


def test_documented_commands_parse() -> None:
    commands = documented_commands()
    assert {command[0] for command in commands} == set(cli.COMMANDS)
    for command in commands:
        args = cli.build_parser(command).parse_args(command)
        assert args.command == command[0]


def test_readme_names_the_scripts_that_are_there() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert set(re.findall(r"\bscripts/(\w+)", readme)) == set(SCRIPTS)


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_files_that_documents_name_are_there(document: Path) -> None:
    places = ("", "octavo", "octavo/page", "octavo/server", "tests", "docs")
    text = document.read_text("utf-8")
    for name in re.findall(r"`([a-z_0-9/]+/[a-z_0-9]+\.(?:py|cpp|h|js|md))`", text):
        assert any((ROOT / place / name).exists() for place in places), name
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize(("document", "lines"), [("README.md", 150), ("docs/architecture.md", 150)])
def test_what_is_read_first_is_short(document: str, lines: int) -> None:
    assert len((ROOT / document).read_text("utf-8").splitlines()) <= lines


@pytest.mark.parametrize(
    "script", [*(f"scripts/{name}" for name in SCRIPTS), "scripts/bench-gpu", ".ci/run"]
)
def test_scripts_are_sound(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111, "must be executable"
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short_and_complete(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 40
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    assert '\nif __name__ == "__main__":\n' in text
