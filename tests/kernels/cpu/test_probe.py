"""csrc/probe.cpp: what a roofline is drawn from."""

from __future__ import annotations

import time

import numpy as np
import pytest

from octavo.base.errors import EngineError
from octavo.kernels.cpu import abi

FORMATS = (
    *("OCT_W3A", "OCT_W4S", "OCT_W8S", "OCT_W4F", "OCT_K4A", "OCT_K6S", "OCT_K4N"),
    *("OCT_BF16", "OCT_F16", "OCT_F32", "OCT_FP4"),
)


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_counted_for_all_workers(native, make_pool, name):
    format = getattr(abi, name)
    one = native.check(native.lib.oct_probe_products(make_pool(1), format, 3))
    assert one > 0 and one % (3 * 2 * 16) == 0  # 3 rounds, products and sums, 16 columns
    assert native.lib.oct_probe_products(make_pool(3), format, 3) == 3 * one
    assert native.lib.oct_probe_products(make_pool(1), format, 6) == 2 * one
    assert native.lib.oct_probe_products(make_pool(1), format, 0) == 0


@pytest.mark.timing
@pytest.mark.parametrize("name", FORMATS)
def test_no_compiler_leaves_the_products_out(native, make_pool, name):
    """Ten times the rounds take longer, by far more than the noise of a clock."""
    format, pool, rounds = getattr(abi, name), make_pool(1), 64

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        native.check(native.lib.oct_probe_products(pool, format, count))
        return time.perf_counter() - begin

    while seconds(rounds) < 1e-3:
        rounds *= 4
    assert min(seconds(10 * rounds) for _ in range(3)) > 3 * min(seconds(rounds) for _ in range(3))


def test_reading_takes_any_size(native):
    data = np.arange(100_000, dtype=np.uint8)
    address = data.ctypes.data
    for num_bytes in (0, 1, 64, 4096, 99_968):
        native.check(native.lib.oct_probe_read(native.pool, address, num_bytes))


def test_what_cannot_be_probed_is_an_error(native):
    for call in (
        lambda: native.lib.oct_probe_products(native.pool, 99, 1),
        lambda: native.lib.oct_probe_products(native.pool, abi.OCT_F32, -1),
        lambda: native.lib.oct_probe_read(native.pool, None, 64),
    ):
        with pytest.raises(EngineError, match="format|rounds|data is NULL"):
            native.check(call())
