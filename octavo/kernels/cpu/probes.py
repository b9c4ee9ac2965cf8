"""Peak rates of the processor with the instructions of the kernels; see ``csrc/probe.cpp``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.kernels.cpu.layout import ARITHMETIC
from octavo.kernels.cpu.library import Library, Pool

READ_BYTES = 256 * 2**20  # more than any cache holds

# A packed format for each arithmetic.
_FORMAT_OF = {name: format for format, name in reversed(ARITHMETIC.items())}


def products(library: Library, pool: Pool, arithmetic: str) -> Callable[[int], float]:
    """Return a function that multiplies ``rounds`` times on all threads and returns the
    operations."""

    def run(rounds: int) -> float:
        done: int = library.check(
            library.lib.oct_probe_products(pool, _FORMAT_OF[arithmetic], rounds)
        )
        return done

    return run


def reads(library: Library, pool: Pool) -> Callable[[], float]:
    """Return a function that reads memory on all threads and returns the bytes."""
    memory = np.ones(READ_BYTES, dtype=np.uint8)  # zeros would all be one page

    def run() -> float:
        library.check(library.lib.oct_probe_read(pool, memory.ctypes.data, memory.nbytes))
        return memory.nbytes

    return run
