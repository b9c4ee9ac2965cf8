"""What steps of a simulation take: keys in blocks that several requests share are read once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.cost.hardware import Device
from octavo.cost.measured_steps import MeasuredSteps, Spread, calibrated
from octavo.cost.rank_model import MatrixOp, RankModel
from octavo.sim.costs import batch_costs, shared_keys

BLOCK = 16
DEVICE = Device(
    name="test",
    kind="cpu",
    memory_bytes=1e9,
    memory_bandwidth=1e10,
    peaks={"fp32": 1e11, "fp16": 1e11, "int8": 1e11},
)


def decoding(table: list[int], draft: Draft | None = None) -> ScheduledRequest:
    """The last token of a full table."""
    request = Request("r", [1] * BLOCK * len(table), SamplingParams(), 0.0)
    request.block_ids = table
    count = 1 if draft is None else 1 + len(draft)
    return ScheduledRequest(request, BLOCK * len(table) - count, count, count, draft)


def test_blocks_that_several_have_count_for_all_but_one():
    items = [decoding([1, 2, 3]), decoding([1, 2, 4]), decoding([1, 5]), decoding([6, 7])]
    assert shared_keys(items, BLOCK) == BLOCK * (1 + 1 + 1)
    assert shared_keys(items[2:], BLOCK) == 0


def test_pieces_of_prompts_do_not_count_and_drafts_do():
    prompt = decoding([1, 2])
    prompt.num_tokens, prompt.num_sampled = 8, 0
    assert shared_keys([decoding([1, 2]), prompt], BLOCK) == 0
    assert shared_keys([decoding([1, 2]), decoding([1, 2], Draft.chain([5]))], BLOCK) == 2 * BLOCK


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4)), min_size=1))
def test_sharing_is_what_all_tables_hold_beyond_what_is_in_any(shapes):
    """By prefixes: (which, how much of it, and how many blocks of one's own)."""
    fresh = iter(range(1000, 10_000))
    tables = [
        [10 * which + i for i in range(length)] + [next(fresh) for _ in range(own)]
        for which, length, own in shapes
    ]
    random.Random(0).shuffle(tables)
    distinct = len({block for table in tables for block in table})
    found = shared_keys([decoding(table) for table in tables], BLOCK)
    assert found == BLOCK * (sum(map(len, tables)) - distinct)


def test_what_is_read_once_costs_once():
    steps = MeasuredSteps(
        {"pass": 1e-3, "decode_key": 1e-6}, {"decode": Spread(0.9, 1.2)}, 9, 9, 99
    )
    matrix = MatrixOp("matrix", 1, 8, 8, num_params=64, num_bytes=64, arithmetic="fp16")
    rank = RankModel((matrix,), (), hidden_size=8, vocab_size=8, num_layers=1)
    value, low, high = batch_costs(calibrated(rank, DEVICE, steps), BLOCK)
    apart = Batch(0, (decoding([1, 2]), decoding([3, 4])))
    together = Batch(1, (decoding([1, 2]), decoding([1, 4])))
    assert value(apart) - value(together) == pytest.approx(BLOCK * 1e-6)
    assert low(apart) < value(apart) < high(apart)
