from __future__ import annotations

import pytest

from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.sim.cost_model import ModelCost, RooflineCost
from octavo.sim.hardware import HardwareSpec

MODEL = ModelCost(
    linear_params=1000,
    head_params=500,
    weight_bytes=2000,
    kv_bytes_per_token=10,
    attention_width=8,
)


def batch(*spans: tuple[int, int, int]) -> Batch:
    """Items of (start, tokens, known tokens)."""
    return Batch(
        0,
        tuple(
            ScheduledRequest(Request("r", [0] * known, SamplingParams(), 0.0), start, count)
            for start, count, known in spans
        ),
    )


def cost(hardware: HardwareSpec, *spans: tuple[int, int, int]) -> float:
    return RooflineCost(MODEL, hardware)(batch(*spans))


def test_decode_is_bound_by_memory():
    slow_memory = HardwareSpec("m", 1e9, memory_bandwidth=100.0, flops=1e12)
    # weights once, then 20 keys read and one written, at 100 bytes a second
    assert cost(slow_memory, (19, 1, 20)) == pytest.approx((2000 + 21 * 10) / 100)


def test_a_batch_reads_the_weights_once():
    slow_memory = HardwareSpec("m", 1e9, memory_bandwidth=100.0, flops=1e12)
    one, two = cost(slow_memory, (19, 1, 20)), cost(slow_memory, (19, 1, 20), (19, 1, 20))
    assert two - one == pytest.approx(21 * 10 / 100)


def test_prefill_is_bound_by_compute_and_attention_is_causal():
    slow_compute = HardwareSpec("c", 1e9, memory_bandwidth=1e12, flops=10.0)
    linear = 2 * (1000 * 4 + 500)
    scores = 1 + 2 + 3 + 4
    assert cost(slow_compute, (0, 4, 4)) == pytest.approx((linear + 4 * 8 * scores) / 10)


def test_the_head_is_paid_only_where_a_token_is_sampled():
    slow_compute = HardwareSpec("c", 1e9, memory_bandwidth=1e12, flops=10.0)
    whole, chunk = cost(slow_compute, (0, 4, 4)), cost(slow_compute, (0, 4, 9))
    assert whole - chunk == pytest.approx(2 * 500 / 10)


def test_overhead_comes_on_top():
    fast = HardwareSpec("f", 1e9, 1e15, 1e15, step_overhead=0.5)
    assert cost(fast, (0, 1, 1)) == pytest.approx(0.5)
