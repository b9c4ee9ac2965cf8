"""Kernels are compiled before any is launched: here for a GPU that is elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from octavo.kernels.cuda.compile_ahead import compile_ahead  # noqa: E402


@triton.jit
def _double(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) * 2)


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
    for kernel in (_double, _broken):
        kernel.device_caches.clear()
    yield tmp_path
    for kernel in (_double, _broken):
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
