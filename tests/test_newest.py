"""What breaks with the newest release of every package: looked at when the pins are renewed.

`scripts/lock` writes what the scripts install, and the suite says whether octavo works with that.
People who run ``pip install octavo`` get what is newest on their day. So this makes an environment
with it, whatever the constraints say, and runs in it the tests that touch other packages.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
HELD_BACK = ROOT / "scripts" / "held-back.txt"

# What nearly every test imports. To run them all would be to run the suite.
EVERYWHERE = {"octavo", "tests", "pytest", "numpy", "torch", "hypothesis", "safetensors", "triton"}
# Tests of what octavo itself calls other packages for, and that do not import them.
ALSO = ("server/http", "server/api", "server/clients", "hub", "plots", "cli/test_end_to_end.py")


def pins(path: Path) -> dict[str, set[str]]:
    """The versions that a file of constraints has of each package."""
    found: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        if match := re.match(r"([\w.-]+)==([^\s;]+)", line):
            found.setdefault(normal(match[1]), set()).add(match[2])
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """What octavo and its tests ask for, without octavo itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return sorted({line for line in lines if not line.startswith("octavo[")})


def modules_to_try() -> list[Path]:
    """The test modules that import packages of others."""
    own = EVERYWHERE | {path.stem for path in (TESTS / "support").glob("*.py")} | {"conftest"}
    chosen = [TESTS / name for name in ALSO]
    for path in sorted(TESTS.rglob("test_*.py")):
        if any(path.is_relative_to(one) for one in chosen) or path == Path(__file__):
            continue
        if imported_by(path) - own - set(sys.stdlib_module_names):
            chosen.append(path)
    return chosen


def imported_by(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_every_requirement_has_a_pin_that_it_allows():
    from packaging.requirements import Requirement

    pinned = pins(CONSTRAINTS)
    for line in requirements():
        requirement = Requirement(line)
        versions = pinned.get(normal(requirement.name), set())
        assert versions, f"{requirement.name} is not in {CONSTRAINTS.name}: run scripts/lock"
        for version in versions:
            assert requirement.specifier.contains(version), f"{line} has the pin {version}"


def test_what_is_held_back_is_pinned_as_it_says():
    pinned = pins(CONSTRAINTS)
    assert pins(HELD_BACK).items() <= pinned.items()


def test_the_tests_that_touch_others_are_found():
    names = {str(path.relative_to(TESTS)) for path in modules_to_try()}
    assert {"models/test_against_transformers.py", "server/clients", "models/test_gguf.py"} <= names
    assert "core/test_engine.py" not in names


@pytest.mark.long
@pytest.mark.network
def test_the_newest_of_everything(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    venv.create(tmp_path / "venv", with_pip=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    held_back = ["--constraint", HELD_BACK]
    subprocess.run([*pip, "install", *held_back, *requirements()], check=True, cwd=ROOT)
    frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    (tmp_path / "frozen.txt").write_text(frozen)

    report = tmp_path / "report.xml"
    tests = [str(path.relative_to(ROOT)) for path in modules_to_try()]
    command = [python, "-m", "pytest", "-n", "auto", "-q", f"--junit-xml={report}", *tests]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]

    broken = broken_in(report)
    newer = newer_than_pinned(pins(tmp_path / "frozen.txt"))
    print(f"newer than pinned: {', '.join(newer) or 'nothing'}")
    assert not broken, (
        f"{len(broken)} tests fail with the newest packages:\n  "
        + "\n  ".join(broken)
        + f"\nnewer than pinned: {', '.join(newer) or 'nothing, so the pins fail too'}"
    )


def broken_in(report: Path) -> list[str]:
    """The tests that failed, each with the first line of why."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            if (why := case.find(kind)) is not None:
                first = (why.get("message") or "").strip().partition("\n")[0]
                found.append(f"{case.get('classname')}::{case.get('name')}: {first[:200]}")
    return found


def newer_than_pinned(found: dict[str, set[str]]) -> list[str]:
    pinned = pins(CONSTRAINTS)
    return [
        f"{name} {'/'.join(sorted(pinned.get(name, {'(not pinned)'})))} -> {version}"
        for name, versions in sorted(found.items())
        for version in versions
        if version.partition("+")[0] not in pinned.get(name, set())
    ]


def test_a_report_says_what_broke(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="test_x">'
        '<failure message="TypeError: no such argument&#10;more">…</failure></testcase>'
        '<testcase classname="tests.a" name="test_y"/></testsuite></testsuites>'
    )
    assert broken_in(path) == ["tests.a::test_x: TypeError: no such argument"]
    assert newer_than_pinned({"torch": pins(CONSTRAINTS)["torch"], "rich": {"999"}}) == [
        f"rich {next(iter(pins(CONSTRAINTS)['rich']))} -> 999"
    ]
