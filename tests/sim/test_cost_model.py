from __future__ import annotations

import itertools

import pytest

from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.models.footprint import Matrix
from octavo.sim.cost_model import AttentionCost, ModelCost, RooflineCost, StepWork, Work
from octavo.sim.hardware import HardwareSpec

MODEL = ModelCost(
    linear_params=1000,
    linear_bytes=1500,
    head_params=500,
    head_bytes=500,
    attention=(AttentionCost(width=8, kv_bytes_per_token=10),),
)


def batch(*spans: tuple[int, int, int]) -> Batch:
    """Items of (start, tokens, known tokens)."""
    return Batch(
        0,
        tuple(
            ScheduledRequest(
                Request("r", [0] * known, SamplingParams(), 0.0),
                start,
                count,
                num_sampled=int(start + count == known),
            )
            for start, count, known in spans
        ),
    )


def work(*spans: tuple[int, int, int], num_rounds: int = 1, model: ModelCost = MODEL) -> StepWork:
    return model.work(batch(*spans).items, num_rounds)


def cost(hardware: HardwareSpec, *spans: tuple[int, int, int]) -> float:
    return RooflineCost(MODEL, hardware)(batch(*spans))


def test_a_decoded_token_reads_all_weights_and_its_keys():
    done = work((19, 1, 20))
    assert done.linear == Work(1500, 2 * 1000)
    assert done.head == Work(500, 2 * 500)
    # 20 keys are read and one is written; a query and a value product of width 8 for each of 20
    assert done.attention == Work(21 * 10, 4 * 8 * 20)
    assert done.total == Work(1500 + 500 + 210, 2000 + 1000 + 640)


def test_a_batch_reads_the_weights_once():
    one, two = work((19, 1, 20)), work((19, 1, 20), (29, 1, 30))
    assert two.linear == Work(1500, 2 * one.linear.flops)
    assert two.head == Work(500, 2 * one.head.flops)
    assert two.attention == Work((21 + 31) * 10, 4 * 8 * (20 + 30))


def test_the_head_is_read_only_where_a_token_is_sampled():
    assert work((0, 4, 9)).head == Work()
    assert work((0, 4, 4)).head == Work(500, 2 * 500)
    assert work((0, 4, 9), (3, 1, 4)).head == Work(500, 2 * 500)


def test_attention_is_causal():
    assert work((0, 4, 4)).attention == Work((4 + 4) * 10, 4 * 8 * (1 + 2 + 3 + 4))
    assert work((2, 2, 4)).attention == Work((4 + 2) * 10, 4 * 8 * (3 + 4))


@pytest.mark.parametrize("window", [1, 3, 4, 7, 100])
def test_a_window_hides_what_is_far_behind(window):
    """Against counting one by one."""
    model = ModelCost(0, 0, 0, 0, (AttentionCost(1, 1.0, window),))
    for start, count in itertools.product(range(12), range(1, 9)):
        seen = [
            range(max(0, query - window + 1), query + 1) for query in range(start, start + count)
        ]
        pairs = sum(map(len, seen))
        keys = len(set().union(*seen))
        done = work((start, count, start + count), model=model).attention
        assert done == Work(keys + count, 4 * pairs)


def test_rounds_are_the_steps_that_they_stand_for():
    apart = work((19, 1, 20)) + work((20, 1, 21)) + work((21, 1, 22))
    assert work((19, 1, 20), num_rounds=3) == apart
    assert apart.linear.bytes == 3 * 1500


def test_chunks_of_a_prompt_read_weights_again_and_score_the_same():
    whole, parts = work((0, 10, 10)), work((0, 6, 10)) + work((6, 4, 10))
    assert parts.total.flops == whole.total.flops
    assert parts.linear.bytes == 2 * whole.linear.bytes
    assert parts.attention.bytes == whole.attention.bytes + 6 * 10  # read again


def test_more_work_is_never_less():
    steps = [(0, 1), (0, 5), (5, 5), (50, 1), (50, 30)]
    for (start, count), (later, more) in itertools.product(steps, steps):
        if later < start or more < count:
            continue
        less = work((start, count, start + count)).total
        greater = work((later, more, later + more)).total
        assert greater.bytes >= less.bytes and greater.flops >= less.flops


def test_decode_is_bound_by_memory():
    slow_memory = HardwareSpec("m", 1e9, memory_bandwidth=100.0, flops=1e12)
    assert cost(slow_memory, (19, 1, 20)) == pytest.approx((2000 + 21 * 10) / 100)


def test_prefill_is_bound_by_compute():
    slow_compute = HardwareSpec("c", 1e9, memory_bandwidth=1e12, flops=10.0)
    linear = 2 * (1000 * 4 + 500)
    assert cost(slow_compute, (0, 4, 4)) == pytest.approx((linear + 4 * 8 * 10) / 10)


def test_each_part_takes_the_longer_of_its_two_times():
    # 2000 bytes against 3000 operations, 210 bytes against 640
    hardware = HardwareSpec("h", 1e9, memory_bandwidth=1.0, flops=2.0)
    assert cost(hardware, (19, 1, 20)) == pytest.approx(2000 + 320)


def test_overhead_comes_on_top():
    fast = HardwareSpec("f", 1e9, 1e15, 1e15, step_overhead=0.5)
    assert cost(fast, (0, 1, 1)) == pytest.approx(0.5)


def test_verifying_drafts_samples_at_every_row_and_reads_keys_once():
    """Three rows for each of two sequences of 20 tokens."""
    by_memory = RooflineCost(MODEL, HardwareSpec("", 0, memory_bandwidth=1, flops=1e12))
    by_compute = RooflineCost(MODEL, HardwareSpec("", 0, memory_bandwidth=1e12, flops=1))
    assert by_memory.verification(2, 3, 20) == 1500 + 500 + 2 * (3 + 23) * 10
    attention = 4 * 8 * 2 * (21 + 22 + 23)
    assert by_compute.verification(2, 3, 20) == 2 * (1000 + 500) * 6 + attention
    assert by_memory.verification(1, 1, 19) == by_memory(batch((19, 1, 20)))


def test_a_model_of_its_config_and_of_what_it_weighs():
    class Config:
        num_layers, num_heads, head_dim = 4, 3, 16
        layer_windows = (512, None, 512, 512)

    matrices = [Matrix(False, 100, 50, ""), Matrix(True, 30, 60, ""), Matrix(False, 20, 11, "")]
    model = ModelCost.of(Config, matrices, kv_bytes_per_token=40.0)
    assert (model.linear_params, model.linear_bytes) == (120, 61)
    assert (model.head_params, model.head_bytes) == (30, 60)
    assert set(model.attention) == {
        AttentionCost(3 * 48, 30.0, 512),
        AttentionCost(48, 10.0, None),
    }
    assert model.weights_bytes == 121
    assert model.flops_per_token == 2 * 150
    assert model.kv_bytes_per_token == 40.0
    assert ModelCost.of(Config, [], 0).weights_bytes == 0


def test_without_windows_all_layers_are_alike():
    class Config:
        num_layers, num_heads, head_dim = 4, 3, 16
        layer_windows = ()

    assert ModelCost.of(Config, [], 8).attention == (AttentionCost(4 * 48, 8, None),)
