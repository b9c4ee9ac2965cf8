"""Native libraries for tests: each test runs on the best level here, and some of its cases on the
scalar one.

All levels have the bits of the scalar one: test_simd.py says it of each operation, test_levels.py
of all kernels, and others of one kind. What is left to differ is where tiles and registers end, so
on the scalar level each value of each parameter is there once, without all combinations; of what
is costly (``thinned_on_scalar``) a few. With ``-m long`` every test runs on all levels.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from thinning import by_function, thin

from octavo.kernels.cpu.library import Library, Pool, load, runnable
from octavo.system import machine

CSRC = Path(__file__).parents[3] / "csrc"

LEVELS = runnable()


@dataclass(frozen=True)
class Native:
    """A library and a pool of two threads: ``native.lib.oct_linear(native.pool, ...)``."""

    library: Library
    pool: Pool

    @property
    def isa(self) -> str:
        return self.library.isa

    @property
    def lib(self):
        return self.library.lib

    def check(self, code: int) -> int:
        return self.library.check(code)


FULLY_TESTED = {*LEVELS[:1], "scalar"}


def as_parameter(level: str):
    """``-m long`` has the others."""
    return level if level in FULLY_TESTED else pytest.param(level, marks=pytest.mark.long)


NOT_BUILT = pytest.param(None, marks=pytest.mark.skip(reason="no native library was built"))


def _open(level: str) -> Iterator[Native]:
    library = load(level)
    with Pool(library, 2) as pool:
        yield Native(library, pool)


@pytest.fixture(scope="session", params=[*map(as_parameter, LEVELS)] or [NOT_BUILT])
def native(request) -> Iterator[Native]:
    yield from _open(request.param)


@pytest.fixture(scope="session", params=LEVELS or [NOT_BUILT])
def native_on_any_level(request) -> Iterator[Native]:
    """For what compares levels."""
    yield from _open(request.param)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LEVELS[:1] == ["scalar"]:
        return  # it is the best one
    here = Path(__file__).parent
    for cases in by_function([item for item in items if here in item.path.parents]):
        on_scalar = [case for case in cases if case.callspec.params.get("native") == "scalar"]
        if on_scalar:
            mark = on_scalar[0].get_closest_marker("thinned_on_scalar")
            thin(on_scalar, 1, *mark.args if mark else ())


@pytest.fixture
def make_pool(native) -> Iterator[Callable[..., Pool]]:
    """``make_pool(3)``: further pools on the same library, closed at the end of the test."""
    pools: list[Pool] = []

    def make(num_threads: int, **options) -> Pool:
        pools.append(Pool(native.library, num_threads, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def compile_stress(tmp_path_factory):
    """``compile_stress("pool_stress.cpp")(2, 100, flags=[...])``: compile a program of this folder
    with what threads and groups are made of, once for the same flags, and run it."""
    compiler = machine.compiler()
    if compiler is None or not CSRC.exists():
        pytest.skip("needs the source tree and a compiler")
    folder = tmp_path_factory.mktemp("stress")

    def of(source: str) -> Callable[..., subprocess.CompletedProcess]:
        def run(*arguments: int, flags: Sequence[str] = ()) -> subprocess.CompletedProcess:
            program = folder / "-".join([source, *(flag.strip("-") for flag in flags)])
            if not program.exists():
                sources = [Path(__file__).with_name(source)]
                sources += [CSRC / f"{name}.cpp" for name in ("pool", "group", "library")]
                options = ["-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-pthread", f"-I{CSRC}"]
                options += ["-DOCT_ISA_NAME=test", *flags]
                subprocess.run([compiler.path, *options, *sources, "-o", program], check=True)
            # A sanitizer ends the program where memory cannot be had, unless it is told not to.
            return subprocess.run(
                [program, *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=120,
                env={**os.environ, "TSAN_OPTIONS": "allocator_may_return_null=1"},
            )

        return run

    return of
