"""Native libraries for tests: each test runs on every level that was built and that runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from octavo.kernels.cpu.library import Library, Pool, load, runnable

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


NOT_BUILT = pytest.param(None, marks=pytest.mark.skip(reason="no native library was built"))


@pytest.fixture(scope="session", params=LEVELS or [NOT_BUILT])
def native(request) -> Iterator[Native]:
    library = load(request.param)
    with Pool(library, 2) as pool:
        yield Native(library, pool)


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
