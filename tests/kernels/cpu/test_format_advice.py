"""What is said of slow formats, and that nothing is said of others."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
from coded_weights import coded, scattered

from octavo.kernels.cpu.format_advice import advise
from octavo.kernels.cpu.library import load, runnable
from octavo.kernels.cpu.packed_weights import lay_out
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.levels import E2M1, E4M3, FP4_LEVELS, NF4_LEVELS

pytestmark = pytest.mark.skipif(not runnable(), reason="no native library was built")

FLOATS = StoredWeight(GGMLType.F16, np.zeros((4, 128), dtype=np.uint8), (4, 64))
INTEGERS = coded(16, 64, 4, 32, 8.0)


def said(caplog, *weights):
    named = {f"w{i}": weight for i, weight in enumerate(weights)}
    with caplog.at_level(logging.WARNING, logger="octavo"):
        advise(named, lay_out(named, load())[0])
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (coded(16, 64, 4, 64, 0.0, NF4_LEVELS), "integers of 4 bits.* a third .*Q4_K_M"),
        (coded(16, 64, 4, 64, 0.0, FP4_LEVELS), "integers of 4 bits.* a third .*Q4_K_M"),
        (coded(16, 128, 8, 128, 0.0, E4M3), "integers of 8 bits.* half or less .*Q8_0"),
        (scattered(INTEGERS, np.arange(64) > 32), "1 of 2 quantized weights .* w2"),
    ],
    ids=["NF4", "FP4", "E4M3", "floats"],
)
def test_a_slow_format_is_said_once(caplog, weight, words):
    (message,) = said(caplog, FLOATS, INTEGERS, weight)
    assert re.search(words, message), message
    caplog.clear()
    assert len(said(caplog, weight, weight, INTEGERS)) == 1


def test_nothing_is_said_of_others(caplog):
    order = np.random.default_rng(0).permutation(64)
    in_act_order = scattered(INTEGERS, order // 32)
    assert not said(caplog, FLOATS, INTEGERS, in_act_order, coded(16, 64, 4, 16, 0.0, E2M1))
