from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import EngineError
from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.kv_tables import GONE
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cuda.sampling import RECORD_WORDS
from octavo.runtime.cuda_inputs import DeviceInputs, DeviceSlots
from octavo.runtime.step_shapes import StepShape

CPU = torch.device("cpu")


def request(name: str, num_tokens: int, block_ids: list[int], *further: list[int]) -> Request:
    made = Request(name, list(range(100, 100 + num_tokens)), SamplingParams(), 0.0)
    made.block_ids, made.further_tables = block_ids, [*further]
    return made


def inputs_of(batch: Batch, rows, padded=None, inputs=None):
    """(the inputs of a step, the views of them), as a step finds them."""
    inputs = inputs or DeviceInputs(CPU, 4, 32, 16, 4)
    buffer = torch.full((inputs.num_words,), 77, dtype=torch.int32)
    records = np.full((len(rows), RECORD_WORDS), 5, np.int32)
    staged = inputs.stage(batch, rows, records, buffer, padded)
    inputs.upload(staged, buffer)
    views = inputs.views(staged.shape)
    inputs.gather_tables(views)
    return inputs, views


def test_a_ragged_step():
    chunk, single = request("chunk", 9, [3, 1, 2]), request("single", 6, [5, 4])
    items = (ScheduledRequest(chunk, 2, 6, 0), ScheduledRequest(single, 5, 1, 1))
    inputs, views = inputs_of(Batch(0, items), [6])
    step, first = views.step, inputs.device_slots.of(chunk)
    assert step.token_ids.tolist() == [102, 103, 104, 105, 106, 107, 105]
    assert step.positions.tolist() == [2, 3, 4, 5, 6, 7, 5]
    assert step.slots[0].tolist() == [14, 15, 4, 5, 6, 7, 17]
    assert step.tables[0].query_start.tolist() == [0, 6, 7]
    assert step.tables[0].seq_lens.tolist() == [8, 6]
    assert step.tables[0].block_tables[:, :3].tolist() == [[3, 1, 2], [5, 4, 0]]
    assert step.max_query == 8  # 6, rounded up
    assert views.rows.tolist() == [6]
    assert views.seq_slots.tolist() == [first, views.row_slots.item()]
    assert (views.records == 5).all()


def test_padding_belongs_to_nobody():
    batch = Batch(0, (ScheduledRequest(request("a", 3, [7]), 2, 1, 1),))
    inputs, views = inputs_of(batch, [0], StepShape.decode(4))
    step = views.step
    assert step.max_query == 1
    assert step.slots[0].tolist() == [30, -1, -1, -1]
    assert step.tables[0].seq_lens.tolist() == [3, 0, 0, 0]
    assert step.tables[0].query_start.tolist() == [0, 1, 1, 1, 1]  # rows of no sequence
    assert (
        views.seq_slots.tolist()[1:]
        == views.row_slots.tolist()[1:]
        == [inputs.device_slots.padding] * 3
    )
    assert not views.records[1:].any() and (step.token_ids[1:] == 0).all()
    # A captured step finds the next one in the same places.
    _, again = inputs_of(batch, [0], StepShape.decode(4), inputs)
    assert again is views


def test_groups_of_layers_have_slots_and_tables_of_their_own():
    chunk = request("chunk", 9, [3, 1, 2], [9, 8, 7])
    single = request("single", 10, [5, 4, 6], [GONE, 10, 11])
    items = (ScheduledRequest(chunk, 2, 6, 0), ScheduledRequest(single, 9, 1, 1))
    inputs = DeviceInputs(CPU, 4, 34, 16, 4, num_groups=2)
    _, views = inputs_of(Batch(0, items), [6], None, inputs)
    step = views.step
    assert [slots.tolist() for slots in step.slots] == [
        [14, 15, 4, 5, 6, 7, 25],
        [38, 39, 32, 33, 34, 35, 45],
    ]
    first, second = step.tables
    assert first.block_tables[:, :3].tolist() == [[3, 1, 2], [5, 4, 6]]
    assert second.block_tables[:, :3].tolist() == [[9, 8, 7], [0, 10, 11]]  # one is gone
    assert first.query_start is second.query_start and first.seq_lens is second.seq_lens
    sections = *step.slots, first.block_tables, second.block_tables
    assert all(section.data_ptr() % 16 == 0 for section in sections)  # one kernel for all groups
    _, views = inputs_of(Batch(1, items[1:]), [0], StepShape.decode(3), inputs)
    assert [slots.tolist() for slots in views.step.slots] == [[25, -1, -1], [45, -1, -1]]
    assert not any(tables.block_tables[1:].any() for tables in views.step.tables)


def test_what_is_not_known_yet_is_a_placeholder():
    ahead = request("a", 5, [0, 1])
    other = request("b", 5, [2, 3])
    inputs = DeviceInputs(CPU, 4, 32, 16, 4)
    inputs_of(Batch(0, (ScheduledRequest(other, 0, 5, 1),)), [4], None, inputs)
    items = (ScheduledRequest(ahead, 5, 1, 1), ScheduledRequest(other, 5, 1, 1))
    _, views = inputs_of(Batch(1, items), [0, 1], None, inputs)
    assert views.step.token_ids.tolist() == [-1 - slot for slot in views.seq_slots.tolist()]


def test_drafts_are_chains():
    known = request("a", 4, [0, 1])
    chain = ScheduledRequest(known, 3, 3, 3, Draft.chain([8, 9]))
    inputs, views = inputs_of(Batch(0, (chain,)), [0, 1, 2])
    assert views.step.token_ids.tolist() == [103, 8, 9]
    assert (
        views.row_slots.tolist() == [inputs.device_slots.padding] * 3
    )  # which one counts is seen later
    tree = ScheduledRequest(known, 3, 3, 3, Draft((8, 9), (-1, -1)))
    with pytest.raises(EngineError, match="trees"):
        inputs_of(Batch(0, (tree,)), [0, 1, 2])


@st.composite
def histories(draw):
    """Steps of four requests: which of them are there, how their tables change, who comes back."""
    steps = []
    kinds = ["grow", "grow", "stay", "adopt", "adopt", "leave behind", "trim", "return", "new"]
    for _ in range(draw(st.integers(1, 12))):
        changes = {}
        for name in draw(st.sets(st.sampled_from("abcd"))):
            kind = draw(st.sampled_from(kinds))
            changes[name] = kind, draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
        steps.append((changes, draw(st.sets(st.sampled_from("abcd")))))
    return steps


@given(histories())
def test_mirrored_tables_are_those_of_the_requests(steps):
    """Whatever happens to them, and whether or not somebody says that a request was away."""
    inputs = DeviceInputs(CPU, 4, 64, 16, 4, num_groups=2)
    live: dict[str, Request] = {}
    for changes, finished in steps:
        gone = tuple(name for name in finished if name in live and name not in changes)
        for name in gone:
            del live[name]
        for name, (kind, blocks) in changes.items():
            _change(live, name, kind, blocks)
        items = tuple(ScheduledRequest(live[name], 0, 1, 0) for name in changes)
        if not items:
            inputs.device_slots.forget(gone)
            continue
        _, views = inputs_of(Batch(0, items, gone), [], None, inputs)
        for index, item in enumerate(items):
            for table, tables in zip(item.request.block_tables, views.step.tables, strict=True):
                mirrored = tables.block_tables[index, : len(table)].tolist()
                kept = [place for place, block_id in enumerate(table) if block_id != GONE]
                assert [mirrored[place] for place in kept] == [table[place] for place in kept]


def _change(live: dict[str, Request], name: str, kind: str, blocks: list[int]) -> None:
    others = [block_id + 100 for block_id in blocks]  # of the second group
    if name not in live or kind == "new":  # of the same name, and not heard of
        live[name] = request(name, 2, blocks, others)
        return
    made = live[name]
    (first, second), published = made.block_tables, made.num_published_blocks
    match kind:
        case "grow":
            made.block_ids = [*first, *blocks][:16]
            made.further_tables = [[*second, *others][:16]]
        case "adopt" if len(first) > published:
            first[published], second[published] = blocks[0], others[0]
            made.num_published_blocks += 1
        case "leave behind" if published > 1:
            second[: published - 1] = [GONE] * (published - 1)
        case "trim" if len(first) - 1 > published:
            del first[-1], second[-1]
        case "return":
            made.num_preemptions += 1
            made.block_ids, made.further_tables = blocks, [[GONE, *others[1:]]]
            made.num_published_blocks = 0


def test_only_what_is_new_in_a_table_is_sent():
    device_slots = DeviceSlots(2, 8)
    made = request("a", 2, [5, 6])
    slot = device_slots.of(made)
    assert device_slots.take_changes() == {slot * 8: 5, slot * 8 + 1: 6}
    made.block_ids = [5, 6, 9]
    device_slots.of(made)
    assert device_slots.take_changes() == {slot * 8 + 2: 9}
    device_slots.of(made)
    assert device_slots.take_changes() == {}
    device_slots.forget(["a", "unknown"])
    assert device_slots.of(request("b", 2, [1])) == slot  # the place that is free again


def test_nobody_is_told_what_is_gone():
    """Where no query looks any more; and a table that others have left gets what is new alone."""
    device_slots = DeviceSlots(2, 8, num_groups=2)
    made = request("a", 2, [5, 6], [7, 8])
    base = device_slots.of(made) * 16
    assert device_slots.take_changes() == {base: 5, base + 1: 6, base + 8: 7, base + 9: 8}
    made.num_published_blocks = 1
    device_slots.of(made)
    made.further_tables[0][0] = GONE
    made.further_tables[0].append(3)
    made.block_ids.append(9)
    device_slots.of(made)
    assert device_slots.take_changes() == {base + 2: 9, base + 10: 3}
