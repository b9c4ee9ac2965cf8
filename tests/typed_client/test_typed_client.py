"""The public API is typed: a strict type checker reads a program that uses it, from outside."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo import planner, quantization, quantize, sim

CLIENT = Path(__file__).with_name("client.py")


@pytest.mark.parametrize("package", [octavo, planner, quantization, quantize, sim])
def test_the_stub_of_a_package_has_its_names(package):
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = {name.asname or name.name for node in imports for name in node.names}
    assert names == set(package.__all__) - {"__version__"}


@pytest.mark.long  # mypy reads most of octavo for it; scripts/check does the same
def test_a_strict_type_checker_accepts_a_client(tmp_path):
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "client.py"]
    result = subprocess.run(
        [*command, f"--cache-dir={tmp_path / 'cache'}"],
        cwd=CLIENT.parent,
        env={"MYPYPATH": str(Path(octavo.__file__).parent.parent), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_the_package_says_that_it_is_typed():
    assert Path(octavo.__file__).with_name("py.typed").exists()
