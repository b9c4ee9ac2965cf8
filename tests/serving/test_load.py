"""csrc/build.py and setup.py: what becomes a library, when, and what is said if nothing does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.kernels.cpu import library
from octavo.system import machine

ROOT = Path(__file__).parents[1]
SOURCE_TREE = (ROOT / "csrc" / "build.py").exists()
pytestmark = pytest.mark.skipif(not SOURCE_TREE, reason="needs the source tree")
needs_compiler = pytest.mark.skipif(machine.compiler() is None, reason="needs a C++ compiler")

HEADER = '#define WORD 7\n#include "deeper.h"\n'
SOURCE = '#include "small.h"\nextern "C" const char* isa() { return NAME(OCT_ISA_NAME); }\n'


@pytest.fixture
def small(tmp_path, monkeypatch):
    """csrc/build.py, as it is in a small project with one source."""
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "build.py").write_text((ROOT / "csrc" / "build.py").read_text())
    (csrc / "small.h").write_text(HEADER)
    (csrc / "deeper.h").write_text("#define NAME_(x) #x\n#define NAME(x) NAME_(x)\n")
    (csrc / "small.cpp").write_text(SOURCE)
    for name in ("CXX", "OCTAVO_NATIVE", "OCTAVO_BUILD_ISA"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("octavo_small_build", csrc / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def libraries(module) -> set[str]:
    return {file.stem.removeprefix("liboctavo_") for file in module.LIBRARIES.glob("*.so")}


def compiled(module) -> set[Path]:
    return {(file, file.stat().st_mtime_ns) for file in module.CACHE.rglob("*.o")}


def test_a_machine_with_a_compiler_has_native_kernels():
    """In the tree that is tested: an installation that built none has failed."""
    if os.environ.get("OCTAVO_NATIVE") == "0" or machine.compiler() is None:
        pytest.skip("native kernels are off, or there is no compiler")
    assert library.built(), library.folder()
    assert library.runnable()


@needs_compiler
def test_levels_become_libraries(small):
    result = small.build()
    assert "scalar" in result.built
    assert libraries(small) == set(result.built)
    record = json.loads((small.LIBRARIES / "build.json").read_text())
    assert record["built"] == result.built
    assert record["compiler"] == result.compiler
    for reason in result.skipped.values():
        assert "does not know" in reason


@needs_compiler
def test_only_what_has_changed_is_compiled(small):
    small.build(isa=["scalar"])
    first = compiled(small)
    small.build(isa=["scalar"])
    assert compiled(small) == first and len(first) == 1
    (small.SOURCES / "deeper.h").write_text('#define NAME_(x) #x "!"\n#define NAME(x) NAME_(x)\n')
    small.build(isa=["scalar"])
    assert len(compiled(small)) == 1 and not compiled(small) & first
    second = compiled(small)
    (small.SOURCES / "unrelated.h").write_text("")
    small.build(isa=["scalar"])
    assert compiled(small) == second


@needs_compiler
def test_what_levels_have_in_common_is_compiled_once(small, monkeypatch):
    (small.SOURCES / "common.cpp").write_text("int common() { return 1; }\n")
    scalar = small.LEVELS[0]
    more = small.Level("more", "", ("-DMORE",), scalar.probe, below="scalar", takes=("common",))
    monkeypatch.setattr(small, "LEVELS", (scalar, more))
    assert small.build().built == ["scalar", "more"]
    made = sorted((file.stem.partition("-")[0], file.parent.name) for file, _ in compiled(small))
    assert made == [("common", "scalar"), ("small", "more"), ("small", "scalar")]
    for level in ("scalar", "more"):
        content = (small.LIBRARIES / f"liboctavo_{level}.so").read_bytes()
        assert b"common" in content and level.encode() in content
    for file, _ in compiled(small):
        file.unlink()
    assert small.build(isa=["more"]).built == ["more"]  # it needs no library of the one below


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("level", ["avxvnni", "avx512bf16"])
def test_a_level_takes_what_it_would_compile_itself(small, level, tmp_path):
    level = next(each for each in small.LEVELS if each.name == level)
    below = next(each for each in small.LEVELS if each.name == level.below)
    command = [*small.find_compiler(), *small.FLAGS, *small.OPTIMIZED, "-c", "-o"]
    for name in level.takes:
        source, out = ROOT / "csrc" / f"{name}.cpp", [tmp_path / "own.o", tmp_path / "taken.o"]
        for flags, made in zip((level.flags, below.flags), out, strict=True):
            subprocess.run([*command, made, *flags, source], check=True)
        assert out[0].read_bytes() == out[1].read_bytes(), name


@needs_compiler
def test_a_restricted_build(small, monkeypatch):
    monkeypatch.setenv("OCTAVO_BUILD_ISA", "scalar")
    assert small.build().built == ["scalar"] and libraries(small) == {"scalar"}
    monkeypatch.setenv("OCTAVO_BUILD_ISA", "scalar,avx1024")
    with pytest.raises(small.BuildError, match="no level avx1024; known: scalar, avx2"):
        small.build()


@needs_compiler
@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
def test_the_best_level_of_this_machine(small, monkeypatch):
    """It is the one that would be chosen of all."""
    small.build()
    (best, *_) = (isa for isa in library.runnable() if isa in libraries(small))
    for file in small.LIBRARIES.glob("*.so"):
        file.unlink()
    monkeypatch.setenv("OCTAVO_BUILD_ISA", "native")
    assert small.build().built == [best] and libraries(small) == {best}
    monkeypatch.setenv("OCTAVO_BUILD_ISA", "all")
    assert len(small.build().built) > 1


@needs_compiler
def test_what_an_installation_builds(small, monkeypatch):
    assert small.isa_from_environment() is None
    assert small.isa_from_environment(["native"]) == ["native"]
    for value, wanted in (("all", None), ("avx2,scalar", ["avx2", "scalar"])):
        monkeypatch.setenv("OCTAVO_BUILD_ISA", value)
        assert small.isa_from_environment(["native"]) == wanted


@needs_compiler
def test_a_loaded_library_is_replaced_not_written_over(small):
    small.build(isa=["scalar"])
    path = small.LIBRARIES / "liboctavo_scalar.so"
    with path.open("rb") as old:
        content = old.read()
        (small.SOURCES / "small.cpp").write_text(SOURCE + "int more() { return WORD; }\n")
        small.build(isa=["scalar"])
        old.seek(0)
        assert old.read() == content != path.read_bytes()


@needs_compiler
def test_sources_that_do_not_compile(small, capsys):
    broken = '#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)\n#error "not here"\n#endif\n'
    (small.SOURCES / "small.cpp").write_text(broken + SOURCE)
    with pytest.raises(small.BuildError, match="not here"):
        small.build()
    result = small.build(keep_going=True)
    assert result.built == ["scalar"]
    assert set(result.skipped.values()) == {"its sources did not compile"}
    assert "not here" in capsys.readouterr().err


def compiler_without(option: str, folder: Path) -> Path:
    """A compiler that is too old to know an option."""
    old = folder / "old-c++"
    real = machine.compiler().path
    refuse = f'case " $* " in *" {option} "*) echo "unknown: {option}" >&2; exit 1;; esac'
    old.write_text(f'#!/bin/sh\n{refuse}\nexec {real} "$@"\n')
    old.chmod(0o755)
    return old


@needs_compiler
@pytest.mark.skipif(machine.cpu().architecture != "x86_64", reason="of x86 levels")
def test_an_old_compiler_costs_a_level(small, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(compiler_without("-mavx512bf16", tmp_path)))
    result = small.build()
    assert "avx512bf16" not in result.built and "avx2" in result.built
    assert "does not know" in result.skipped["avx512bf16"]
    assert "-mavx512bf16" in result.skipped["avx512bf16"]


def test_no_compiler(small, monkeypatch):
    stale = small.LIBRARIES / "liboctavo_scalar.so"
    stale.parent.mkdir(parents=True)
    stale.touch()
    monkeypatch.setenv("PATH", "")
    result = small.build()
    assert result.built == [] and not stale.exists()
    record = json.loads((small.LIBRARIES / "build.json").read_text())
    assert "no C++ compiler was found" in record["skipped"]["all"]
    assert "apt-get install g++" in record["skipped"]["all"]


def test_native_kernels_switched_off(small, monkeypatch):
    monkeypatch.setenv("OCTAVO_NATIVE", "0")
    assert "OCTAVO_NATIVE=0" in small.build().skipped["all"]


@needs_compiler
def test_the_command(small):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(small.SOURCES / "build.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    assert run("--isa", "scalar").stdout == "native kernels: scalar\n"
    assert run("--isa", "scalar", "--quiet").stdout == ""
    (small.SOURCES / "small.cpp").write_text("not C++")
    failed = run("--isa", "scalar")
    assert failed.returncode == 1 and "small.cpp" in failed.stderr


@pytest.fixture(scope="module")
def has_setuptools():
    # Not imported here: it would replace distutils, which other tests may have loaded.
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("setuptools is not installed")
    if tuple(map(int, version.split(".")[:2])) < (70, 1):
        pytest.skip(f"setuptools {version} makes no wheels by itself")


def wheel(small, tmp_path, **environment: str) -> Path:
    """A wheel of the small project, made by octavo's own setup.py."""
    project = small.SOURCES.parent
    (project / "setup.py").write_text((ROOT / "setup.py").read_text())
    (project / "MANIFEST.in").write_text((ROOT / "MANIFEST.in").read_text())
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "small"\nversion = "1"\n'
        '[tool.setuptools.packages.find]\ninclude = ["octavo*"]\n'
    )
    package = project / "octavo" / "kernels" / "cpu"
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (project / "docs" / "pictures").mkdir(parents=True, exist_ok=True)
    for document in ("inference.md", "pictures/wall.webp"):
        (project / "docs" / document).touch()
    command = [sys.executable, "-c", "from setuptools import build_meta as b; import sys; "
               "b.build_wheel(sys.argv[1])", str(tmp_path / "wheels")]  # fmt: skip
    environment = {"OCTAVO_BUILD_ISA": "scalar", **os.environ, **environment}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "wheels").glob("*.whl")
    return made


@needs_compiler
def test_a_wheel_with_kernels_is_of_one_platform_and_any_python(small, tmp_path, has_setuptools):
    made = wheel(small, tmp_path)
    assert made.name.startswith("small-1-py3-none-") and not made.name.endswith("-any.whl")
    with zipfile.ZipFile(made) as archive:
        names = set(archive.namelist())
        info = archive.read("small-1.dist-info/WHEEL").decode()
    assert "octavo/kernels/cpu/lib/liboctavo_scalar.so" in names
    assert not any("csrc" in name for name in names)
    assert "Root-Is-Purelib: false" in info


def test_a_wheel_without_kernels_is_of_any_platform(small, tmp_path, has_setuptools):
    made = wheel(small, tmp_path, OCTAVO_NATIVE="0")
    assert made.name == "small-1-py3-none-any.whl"
    with zipfile.ZipFile(made) as archive:
        names = set(archive.namelist())
        record = json.loads(archive.read("octavo/kernels/cpu/lib/build.json"))
    assert not any(name.endswith(".so") for name in names)
    documents = "octavo/page/documents"
    assert {f"{documents}/inference.md", f"{documents}/pictures/wall.webp"} <= names
    assert "OCTAVO_NATIVE=0" in record["skipped"]["all"]
