from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.runtime.input_batch import InputBatch


def make_item(name: str, tokens: list[int], blocks: list[int], start: int, count: int):
    request = Request(name, tokens, SamplingParams(), 0.0)
    request.block_ids = blocks
    return ScheduledRequest(request, start, count, 1)


def test_a_ragged_batch_is_laid_end_to_end():
    inputs = InputBatch(4, 8, block_size=2).build(
        Batch(
            0,
            (
                make_item("a", [10, 11, 12, 13, 14], [3, 7, 1], 0, 5),
                make_item("b", [20, 21, 22, 23], [5, 6], 3, 1),
                make_item("c", [30, 31, 32, 33], [2, 4], 1, 2),
            ),
        )
    )
    assert inputs.token_ids.tolist() == [10, 11, 12, 13, 14, 23, 31, 32]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 3, 1, 2]
    assert inputs.slot_mapping[0].tolist() == [6, 7, 14, 15, 2, 13, 5, 8]
    assert inputs.query_start.tolist() == [0, 5, 6, 8]
    assert inputs.seq_lens.tolist() == [5, 4, 3]
    assert inputs.block_tables[0, :, :2].tolist() == [[3, 7], [5, 6], [2, 4]]


def with_draft(item: ScheduledRequest, draft: Draft) -> ScheduledRequest:
    return replace(item, num_tokens=item.num_tokens + len(draft), draft=draft)


def test_a_tree_has_slots_in_its_order_and_positions_by_depth():
    tree = Draft((7, 8, 9, 7, 5), (-1, -1, 0, 1, 3))
    chain = Draft.chain([3, 4])
    inputs = InputBatch(4, 8, block_size=2).build(
        Batch(
            0,
            (
                make_item("a", [10, 11, 12], [3, 7], 1, 2),
                with_draft(make_item("b", [20, 21, 22, 23], [5, 6, 0, 1, 2], 2, 2), tree),
                with_draft(make_item("c", [30, 31], [2, 4], 1, 1), chain),
            ),
        )
    )
    assert inputs.token_ids.tolist() == [11, 12, 22, 23, 7, 8, 9, 7, 5, 31, 3, 4]
    assert inputs.parents.tolist() == [-1, -1, -1, -1, 3, 3, 4, 5, 7, -1, -1, -1]
    assert inputs.positions.tolist() == [1, 2, 2, 3, 4, 4, 5, 5, 6, 1, 2, 3]
    assert inputs.slot_mapping[0].tolist() == [7, 14, 12, 13, 0, 1, 2, 3, 4, 5, 8, 9]
    assert inputs.seq_lens.tolist() == [3, 9, 4]


def test_a_batch_of_chains_has_no_parents():
    item = with_draft(make_item("c", [30, 31], [2, 4], 1, 1), Draft.chain([3, 4]))
    inputs = InputBatch(4, 8, block_size=2).build(Batch(0, (item,)))
    assert inputs.parents is None and inputs.positions.tolist() == [1, 2, 3]


def test_tables_follow_every_change_of_a_request():
    """Growth, adoption of other blocks, preemption and reuse of an id, against a plain rebuild."""
    rng = random.Random(0)
    size, kept = 4, InputBatch(3, 16, 4)
    tables: dict[str, list[int]] = {}
    finished: list[str] = []
    for step in range(500):
        event = rng.random()
        if event < 0.2 and len(tables) < 3:
            tables[rng.choice([n for n in "abc" if n not in tables])] = [rng.randrange(99)]
        elif event < 0.3 and tables:
            gone = rng.choice(sorted(tables))
            del tables[gone]
            finished.append(gone)
        for blocks in tables.values():
            if rng.random() < 0.3 and len(blocks) < 16:
                blocks.append(rng.randrange(99))
            if rng.random() < 0.1:
                blocks[rng.randrange(len(blocks))] = rng.randrange(99)
        if not tables:
            continue
        items = tuple(
            make_item(name, list(range(len(blocks) * size)), blocks, len(blocks) * size - 1, 1)
            for name, blocks in tables.items()
        )
        inputs = kept.build(Batch(step, items, tuple(finished)))
        finished = []
        fresh = InputBatch(3, 16, 4).build(Batch(step, items))
        assert np.array_equal(inputs.slot_mapping, fresh.slot_mapping)
        for row, item in enumerate(items):
            blocks = item.request.block_ids
            assert inputs.block_tables[0, row, : len(blocks)].tolist() == blocks


def test_arrays_of_a_step_outlive_the_next():
    batch = InputBatch(2, 4, 2)
    first = batch.build(Batch(0, (make_item("a", [1, 2], [3], 0, 2),)))
    batch.build(Batch(1, (make_item("b", [5, 6], [2], 0, 2),), finished_ids=("a",)))
    assert first.block_tables.tolist() == [[[3]]] and first.token_ids.tolist() == [1, 2]
