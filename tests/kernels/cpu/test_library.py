"""Which native library is used where, and what is said where there is none."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import shutil

import pytest

from octavo.base.errors import ConfigError, EngineError
from octavo.kernels.cpu import abi, library
from octavo.kernels.cpu.library import LEVELS, Library, Pool, Unavailable
from octavo.system import machine


def processor(*isa: str) -> machine.Cpu:
    return dataclasses.replace(machine.cpu(), isa=isa)


ZEN5 = processor(*LEVELS["avx512bf16"], "avx_vnni")
ALDER_LAKE = processor(*LEVELS["avxvnni"])
HASWELL = processor(*LEVELS["avx2"])
CORE2 = processor("sse4_2")
GRAVITON3 = processor("asimd", *LEVELS["neoni8mm"], "sve")
GRAVITON2 = processor("asimd", *LEVELS["neon"])


ARM = ("neoni8mm", "neon")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of libraries that pretends to be the installed one. Empty at first."""
    monkeypatch.setenv("OCTAVO_LIBRARY_DIR", str(tmp_path))
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    return tmp_path


@pytest.fixture
def all_levels(folder):
    for isa in LEVELS:
        if isa not in ARM:
            (folder / f"liboctavo_{isa}.so").touch()
    return folder


@pytest.mark.parametrize(
    ("cpu", "chosen"),
    [(ZEN5, "avx512bf16"), (ALDER_LAKE, "avxvnni"), (HASWELL, "avx2"), (CORE2, "scalar")],
)
def test_the_best_level_that_runs(all_levels, cpu, chosen):
    assert library.choose(cpu) == chosen
    (all_levels / f"liboctavo_{chosen}.so").unlink()
    if chosen != "scalar":
        worse = list(LEVELS).index(library.choose(cpu))
        assert worse > list(LEVELS).index(chosen)


@pytest.mark.parametrize(("cpu", "chosen"), [(GRAVITON3, "neoni8mm"), (GRAVITON2, "neon")])
def test_the_best_level_of_arm(folder, monkeypatch, cpu, chosen):
    for isa in (*ARM, "scalar"):
        (folder / f"liboctavo_{isa}.so").touch()
    assert library.choose(cpu) == chosen
    monkeypatch.setenv("OCTAVO_ISA", "neon")
    assert library.choose(cpu) == "neon"


def test_i8mm_without_bf16_is_neon(folder, monkeypatch):
    for isa in ARM:
        (folder / f"liboctavo_{isa}.so").touch()
    cpu = processor("asimddp", "i8mm")
    assert library.choose(cpu) == "neon"
    monkeypatch.setenv("OCTAVO_ISA", "neoni8mm")
    with pytest.raises(Unavailable, match="OCTAVO_ISA=neoni8mm: this processor lacks bf16"):
        library.choose(cpu)


def test_avx512_without_vnni_is_avx2(all_levels):
    skylake = processor(*LEVELS["avx2"], "avx512f", "avx512bw", "avx512vl")
    assert library.choose(skylake) == "avx2"


def test_a_forced_level(all_levels, monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "AVX2")
    assert library.choose(ZEN5) == "avx2"
    with pytest.raises(Unavailable, match="OCTAVO_ISA=avx2: this processor lacks avx2, fma, f16c"):
        library.choose(CORE2)


def test_a_forced_level_that_was_not_built(all_levels, monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "neon")
    with pytest.raises(Unavailable, match="neon was not built: it was left out.*Built: avx512bf16"):
        library.choose(ZEN5)
    skipped = {"neon": "old-g++ does not know -march=armv8.2-a"}
    (all_levels / "build.json").write_text(json.dumps({"skipped": skipped}))
    with pytest.raises(Unavailable, match="neon was not built: old-g\\+\\+ does not know"):
        library.choose(ZEN5)
    with pytest.raises(Unavailable, match="neon was not built"):
        library.load("neon")


@pytest.mark.parametrize("word", ["none", "reference", "None"])
def test_no_native_kernels_on_request(all_levels, monkeypatch, word):
    monkeypatch.setenv("OCTAVO_ISA", word)
    with pytest.raises(Unavailable, match="asks for the reference kernels"):
        library.choose(ZEN5)
    with pytest.raises(Unavailable, match="asks for the reference kernels"):
        library.load()


def test_a_level_that_is_none(all_levels, monkeypatch):
    with pytest.raises(Unavailable, match="no level 'sse9'; known: avx512bf16, "):
        library.load("sse9")
    monkeypatch.setenv("OCTAVO_ISA", "sse9")
    with pytest.raises(ConfigError, match="OCTAVO_ISA=sse9 is no level; known: avx512bf16, "):
        library.choose(ZEN5)


def test_nothing_was_built(folder):
    with pytest.raises(Unavailable, match="there are no libraries in .*Install octavo again"):
        library.choose(ZEN5)
    reason = "no C++ compiler was found when octavo was installed"
    (folder / "build.json").write_text(json.dumps({"skipped": {"all": reason}}))
    with pytest.raises(Unavailable, match="no native CPU kernels: no C") as caught:
        library.load()
    assert caught.value.reason.startswith(reason)
    (folder / "build.json").write_text("[")
    with pytest.raises(Unavailable, match="there are no libraries"):
        library.choose(ZEN5)


def test_nothing_that_runs_was_built(folder):
    (folder / "liboctavo_avx2.so").touch()
    with pytest.raises(Unavailable, match="this processor can run none of avx2"):
        library.choose(CORE2)


def test_a_broken_library(folder):
    (folder / "liboctavo_scalar.so").write_bytes(b"no library")
    with pytest.raises(Unavailable, match="liboctavo_scalar.so cannot be loaded"):
        library.load("scalar")


def test_a_library_of_another_version(native, folder, monkeypatch):
    copy = folder / "liboctavo_scalar.so"
    shutil.copy(native.library.path, copy)
    monkeypatch.setattr(abi, "OCT_ABI_VERSION", 1000)
    with pytest.raises(Unavailable, match="of the interface, this octavo needs 1000"):
        library.load("scalar")


def test_a_library_of_another_build(native, folder, monkeypatch):
    """As it lies about after an update that was not built."""

    class Longer(ctypes.Structure):
        _fields_ = (*abi.Sample._fields_, ("more", ctypes.c_int64))

    copy = folder / "liboctavo_scalar.so"
    shutil.copy(native.library.path, copy)
    monkeypatch.setitem(abi.STRUCTS, "oct_sample", Longer)
    size = ctypes.sizeof(abi.Sample)
    stale = f"of another build: oct_sample has {size} bytes there, {size + 8} here. Install octavo"
    with pytest.raises(Unavailable, match=stale):
        library.load("scalar")


def test_a_library_that_lacks_a_function(native, folder, monkeypatch):
    copy = folder / "liboctavo_scalar.so"
    shutil.copy(native.library.path, copy)
    monkeypatch.setitem(abi.FUNCTIONS, "oct_dream", (ctypes.c_int32, ()))
    with pytest.raises(Unavailable, match="lacks oct_dream. Install octavo again"):
        library.load("scalar")


def test_a_library_says_what_it_is(native):
    assert native.lib.oct_isa().decode() == native.isa
    assert native.isa in repr(native.library)
    assert library.load(native.isa) is native.library


def test_codes(native):
    assert native.check(0) == 0
    assert native.check(128) == 128
    native.lib.oct_pool_new(0, 0)
    with pytest.raises(EngineError, match=f"native kernels \\({native.isa}\\): a pool of 0"):
        native.check(abi.OCT_ERR_ARGUMENT)
    with pytest.raises(MemoryError):
        native.check(abi.OCT_ERR_MEMORY)


def test_a_pool_of_all_usable_cores(native):
    with Pool(native.library) as pool:
        assert pool.size == library.usable_threads() == machine.cpu().usable_cores
        assert isinstance(native.library, Library)
    pool.close()  # again
    assert native.lib.oct_pool_size(pool) == 0
