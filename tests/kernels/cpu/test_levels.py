"""Whole kernels on all instruction sets: the same bits, but for bfloat16 where it is in hardware.

levels_probe.cpp calls the kernels of a library on fixed inputs. Those of ARM are built here and run
under qemu, if there is a cross compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels.cpu.library import load, runnable
from octavo.system import machine

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "csrc" / "build.py"
ARM = ("neon", "neoni8mm")
QEMU = ("aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu")
OWN_ROUNDING = ("avx512bf16", "neoni8mm")  # of products of bfloat16

pytestmark = pytest.mark.skipif(
    not BUILD.exists() or machine.compiler() is None, reason="needs the source tree and a compiler"
)


def probe(compiler: str, folder: Path, library: Path, *runner: str) -> dict[str, str]:
    """Results by name, as text."""
    program = folder / f"levels_probe-{Path(compiler).name}"
    if not program.exists():
        options = ["-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{BUILD.parent}"]
        source = Path(__file__).with_name("levels_probe.cpp")
        subprocess.run([compiler, *options, source, "-o", program, "-ldl"], check=True)
    done = subprocess.run([*runner, program, library], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout.splitlines()[-1:] + [done.stderr]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("levels")


@pytest.fixture(scope="module")
def scalar(folder) -> dict[str, str]:
    if "scalar" not in runnable():
        pytest.skip("the level scalar was not built")
    return probe(machine.compiler().path, folder, load("scalar").path)


@pytest.mark.parametrize("isa", [isa for isa in runnable() if isa != "scalar"])
def test_a_level_gives_the_bits_of_the_scalar_one(isa, scalar, folder):
    compare(isa, probe(machine.compiler().path, folder, load(isa).path), scalar)


def compare(isa: str, found: dict[str, str], scalar: dict[str, str]) -> None:
    assert found.keys() == scalar.keys() and len(found) > 140
    differ = {name for name in found if found[name] != scalar[name]}
    if isa in OWN_ROUNDING:
        assert all("bf16" in name for name in differ)
        for name in differ:  # the numbers, behind the hash
            numbers = [list(map(float, side[name].split()[1:])) for side in (found, scalar)]
            assert numbers[0] == pytest.approx(numbers[1], rel=2e-2, abs=5e-3)
    else:
        assert not differ
    together = {name: value for name, value in found.items() if name.startswith("together.")}
    assert len(together) > 10
    for name, value in together.items():  # whatever products a block of rows is made of
        assert value == found[name.replace("together.", "alone.")]


@pytest.fixture(scope="module")
def arm_libraries() -> Path:
    into = ROOT / "build" / "aarch64"  # kept: compiling takes a while
    subprocess.run(
        [sys.executable, BUILD, "--isa", ",".join(ARM), "--into", into, "--quiet"],
        env={**os.environ, "CXX": QEMU[0]},
        check=True,
    )
    return into


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, QEMU[:2])), reason=f"needs {' and '.join(QEMU[:2])}")
@pytest.mark.skipif(machine.cpu().architecture == "aarch64", reason="this processor runs them")
@pytest.mark.parametrize("isa", ARM)
def test_a_level_of_arm_gives_the_bits_of_the_scalar_one(isa, arm_libraries, scalar, folder):
    library = arm_libraries / f"liboctavo_{isa}.so"
    compare(isa, probe(QEMU[0], folder, library, QEMU[1], "-L", QEMU[2]), scalar)
