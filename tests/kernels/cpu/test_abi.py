"""abi.py says the same as csrc/octavo.h."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from octavo.kernels.cpu import abi
from octavo.system import machine

HEADER = Path(__file__).parents[3] / "csrc" / "octavo.h"
pytestmark = pytest.mark.skipif(not HEADER.exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)


def test_the_version_and_all_constants(header):
    declared = {
        name: int(value)
        for body in re.findall(r"enum\s*\{(.*?)\}", header, re.S)
        for name, value in re.findall(r"(\w+)\s*=\s*(-?\d+)", body)
    }
    defines = re.findall(r"#define (OCT_(?:ABI|MAX)\w+) (\d+)", header)
    declared |= {name: int(value) for name, value in defines}
    mirrored = {name: value for name, value in vars(abi).items() if name.startswith("OCT_")}
    assert declared and mirrored == declared


def test_all_functions_are_declared_with_as_many_arguments(header):
    declared = {
        name: 0 if arguments.strip() == "void" else arguments.count(",") + 1
        for name, arguments in re.findall(r"\b(oct_\w+)\(([^)]*)\)", header)
    }
    assert {name: len(arguments) for name, (_, arguments) in abi.FUNCTIONS.items()} == declared


def test_structs_have_the_same_fields_in_the_same_places(header, tmp_path):
    compiler = machine.compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    names = re.findall(r"\}\s*(oct_\w+);", header)
    assert set(names) == set(abi.STRUCTS)

    lines = ["#include <cstddef>", "#include <cstdio>", f'#include "{HEADER}"', "int main() {"]
    expected = []
    for name, struct in abi.STRUCTS.items():
        lines.append(f'std::printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            where = f"offsetof({name}, {field}), sizeof({name}::{field})"
            lines.append(f'std::printf("{name}.{field} %zu %zu\\n", {where});')
            place = getattr(struct, field)
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    source = tmp_path / "sizes.cpp"
    source.write_text("\n".join([*lines, "}"]))
    program = tmp_path / "sizes"
    subprocess.run([compiler.path, source, "-o", program], check=True)
    told = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert told.splitlines() == expected


def test_the_library_has_all_functions(native):
    assert native.library.missing == []
