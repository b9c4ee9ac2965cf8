"""Kernels are compiled before any is launched: here for a GPU that is elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from device_weights import KINDS, device_weight  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from octavo.kernels.cuda.compile_ahead import compile_ahead  # noqa: E402


@triton.jit
def _double(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) * 2)


@triton.jit
def _by_kind(x, KIND: tl.constexpr):
    tl.store(x, 1 if KIND == "int8" else 2)


@triton.jit
def _broken(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.no_such_function(x))


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton believes in an H100, and keeps what it compiles in a folder of its own."""
    there = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", there)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for kernel in (_double, _by_kind, _broken):
        kernel.device_caches.clear()
    yield tmp_path
    for kernel in (_double, _by_kind, _broken):
        kernel.device_caches.clear()


def launch_doubles() -> None:
    x = torch.zeros(64)
    for size in (16, 32, 64, 32):
        _double[(1,)](x, x, SIZE=size)


def binaries(folder: Path) -> int:
    return len(list(folder.rglob("*.cubin")))


def test_what_would_be_launched_is_compiled_and_kept(kept_in, caplog):
    caplog.set_level("INFO", "octavo")
    assert compile_ahead(launch_doubles, threads=2) == 3
    assert binaries(kept_in) == 3
    assert "compiling 3 kernels" in caplog.text and "3 kernels are compiled after" in caplog.text
    assert compile_ahead(lambda: None, threads=2) == 0


def test_another_process_finds_them_on_disk(kept_in):
    compile_ahead(launch_doubles, threads=2)
    before = {path: path.stat().st_mtime_ns for path in kept_in.rglob("*.cubin")}
    _double.device_caches.clear()
    assert compile_ahead(launch_doubles, threads=2) == 3
    assert {path: path.stat().st_mtime_ns for path in kept_in.rglob("*.cubin")} == before


def test_a_kernel_that_does_not_compile_costs_no_other(kept_in):
    def launch() -> None:
        _broken[(1,)](torch.zeros(16), SIZE=16)
        launch_doubles()

    assert compile_ahead(launch, threads=2) == 4
    assert binaries(kept_in) == 3


def test_what_triton_cannot_do_ahead_is_left_to_the_launches(kept_in, monkeypatch, caplog):
    def refuse(self, specialization):
        raise RuntimeError("made by another version")

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "preload", refuse)
    assert compile_ahead(launch_doubles, threads=1) == 3
    assert "one after the other: made by another version" in caplog.text


@pytest.mark.parametrize(("kind", "is_ahead"), [("s8", True), ("int8", False), ("fp8", True)])
def test_a_string_that_names_a_type_is_left_to_the_launch(kept_in, kind, is_ahead):
    """Triton would compile the kernel with a type in its place."""
    x = torch.zeros(16, dtype=torch.int32)
    assert compile_ahead(lambda: _by_kind[(1,)](x, KIND=kind), threads=1) == is_ahead


def test_no_kernel_has_such_a_string():
    from octavo.kernels.cuda.elementwise import CODE_TYPES
    from octavo.kernels.cuda.kv_codes import kind_of
    from octavo.kernels.cuda.linear import parts_of
    from octavo.kernels.cuda.products import ACTIVATIONS
    from octavo.kernels.kv_stores import CODECS, KVStore

    stores = [KVStore(codec, []) for kv in ("float32", "int8", "fp8") for codec in CODECS[kv]]
    weights = [device_weight(kind, 64, 512, torch.float32) for kind in KINDS]
    names = {
        *map(kind_of, stores),
        *(parts_of(weight, torch.float32)[0] for weight in weights),
        *(code.name for code in CODE_TYPES.values()),
        *ACTIVATIONS,
    }
    assert len(names) >= 8 and not any(map(tl.dtype.is_dtype, names))
