"""The input arrays of a forward pass, made from a batch of requests.

A step mixes prompt chunks and single tokens in one ragged batch, laid end to end::

    request      A A A A A | B | C C C
    token_ids    . . . . . | . | . . .     T tokens
    positions    0 1 2 3 4 | 9 | 4 5 6     in their own sequences
    query_start  0           5   6     9   S + 1 offsets
    seq_lens     5          10   7         KV that exists once the step has run

The KV of a request's tokens is written to slots in their order. That is the order of their
positions, too, except in drafts that are trees::

    token_ids    . . . . .                 a known token, and a draft
    parents     -1 5 5 6 8                 the row that each of the draft follows
    positions    9 10 10 11 12
    slots        9 10 11 12 13             by the block table

Rows of a tree are rows of the step: here, the known token is row 5.

Of a request with a ``SinkWindow``, the executor gets only the blocks that are attended to: those
that have left the window are omitted from its table, so that an endless stream has a table of
bounded length::

    position     0 1 2 3 | 4 ... 515 | 516 .. 1019         a window of 504, after 4 sinks
    slot         0 1 2 3             | 260 ..  763         256 are left out, the others are gone
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from octavo.core.batch import Batch
from octavo.core.request import Request
from octavo.core.sink_window import SinkWindow, unit_left_out
from octavo.core.state_types import StateStep

_ENDLESS = 1 << 62  # the turn of requests without a sink window


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Arrays of one step, over T tokens and S requests. A group is the layers that share block
    tables."""

    token_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64, rows of the rope tables
    slot_mapping: np.ndarray  # [groups, T] int64, where each token's KV is written
    query_start: np.ndarray  # [S + 1] int32
    seq_lens: np.ndarray  # [S] int32
    # [groups, S, longest table of the step] int32, padded with block 0; see ``core/kv_tables.py``
    block_tables: np.ndarray
    # [T] int32, the row that each row of a tree follows, -1 for others; None if there is no tree.
    parents: np.ndarray | None
    # The sink window of each request; None if no request has one.
    sink_windows: Sequence[StepSinkWindow | None] | None = None


class StepSinkWindow(NamedTuple):
    """The sink window of a request, and the number of tokens behind its sinks without slots."""

    sink_window: SinkWindow
    left_out: int


def blocks_of_row(max_model_len: int, step_tokens: int, block_size: int) -> int:
    """Return the blocks of the longest table: of a whole context; or, for an endless request, of
    its window, the tokens that are not yet left out, and the tokens of a step."""
    return -(-(max_model_len + unit_left_out(block_size) + step_tokens) // block_size) + 4


class BlockTables:
    """Block tables of running requests, in rows of a persistent array: int32
    [groups, max_num_seqs, max_blocks_per_seq].

    A table changes by a block at a time, so a step writes only the new entries.
    """

    def __init__(
        self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, num_groups: int = 1
    ):
        self.block_size = block_size
        self.array = np.zeros((num_groups, max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._rows: dict[str, int] = {}
        self._written: dict[str, list[list[int]]] = {}

    def row(self, request: Request, left_out: int = 0) -> int:
        """Update a request's tables and return their row. ``left_out`` tokens behind its sinks are
        omitted from them."""
        request_id = request.request_id
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = self._free_rows.pop()
            self._written[request_id] = [[] for _ in range(len(self.array))]
        written = self._written[request_id]
        if left_out:
            tables = [self._without(table, request, left_out) for table in request.block_tables]
        else:
            tables = [request.block_ids, *request.further_tables]
        for group, table in enumerate(tables):
            if written[group] != table:
                written[group] = self._write(group, row, written[group], table)
        return row

    def _without(self, table: list[int], request: Request, left_out: int) -> list[int]:
        assert request.sink_window is not None
        first = -(-request.sink_window.sinks // self.block_size)
        return table[:first] + table[first + left_out // self.block_size :]

    def _write(self, group: int, row: int, written: list[int], table: list[int]) -> list[int]:
        """Write the new entries of a table; return a copy of it."""
        # Tables mostly grow at the end, but a block that is adopted or copied, or that leaves the
        # window, can change any entry.
        kept = len(written)
        if table[:kept] != written:
            kept = 0
        self._store(group, row, kept, table[kept:])
        return table.copy()

    def _store(self, group: int, row: int, first: int, entries: Sequence[int]) -> None:
        self.array[group, row, first : first + len(entries)] = entries

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the rows of requests that have left the batch."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free_rows.append(row)
                del self._written[request_id]


class FlatBatch(NamedTuple):
    """The items of a batch as flat lists: of tokens, and one entry for each item in the others."""

    token_ids: list[int]
    starts: list[int]  # the first KV slot
    counts: list[int]
    rows: list[int]  # in the block tables
    num_blocks: int  # of the longest table
    parents: list[int]  # of all tokens, empty without trees; see ``StepInputs``
    sink_windows: list[StepSinkWindow | None]  # empty if no request has one


def flatten(batch: Batch, tables: BlockTables) -> FlatBatch:
    """Return the flat lists of a batch, and update its block tables.

    Lists, because entries of an array are slow to set one by one.
    """
    tables.forget((*batch.finished_ids, *batch.preempted_ids))
    token_ids: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    rows: list[int] = []
    parents: list[int] = []
    sink_windows: list[StepSinkWindow | None] = []
    num_blocks = 0
    for item in batch.items:
        request, start, count = item.request, item.start, item.num_tokens
        if item.draft is not None:
            token_ids += request.token_ids[start : item.end]
            if not item.draft.is_chain:
                first = len(token_ids)
                parents += [-1] * (first - len(parents))
                parents += [first + parent for parent in item.draft.parents]
            token_ids += item.draft.token_ids
        elif count == 1:
            token_ids.append(request.token_ids[start])
        else:
            token_ids += request.token_ids[start : start + count]
        left_out = 0
        if (sink_window := request.sink_window) is not None:
            left_out = sink_window.left_out(start, tables.block_size)
            sink_windows += [None] * (len(starts) - len(sink_windows))
            sink_windows.append(StepSinkWindow(sink_window, left_out))
        starts.append(start - left_out)
        counts.append(count)
        rows.append(tables.row(request, left_out))
        num_blocks = max(num_blocks, len(request.block_ids) - left_out // tables.block_size)
    if parents:
        parents += [-1] * (len(token_ids) - len(parents))
    if sink_windows:
        sink_windows += [None] * (len(starts) - len(sink_windows))
    return FlatBatch(token_ids, starts, counts, rows, num_blocks, parents, sink_windows)


def token_types(batch: Batch) -> list[int]:
    """Return the types of a batch's tokens (see ``PoolingInput``); empty if all are 0."""
    inputs = [item.request.pooling for item in batch.items]
    if not any(each is not None and each.token_types for each in inputs):
        return []
    types: list[int] = []
    for item, each in zip(batch.items, inputs, strict=True):
        own = () if each is None else each.token_types[item.start : item.start + item.num_tokens]
        types += own or (0,) * item.num_tokens
    return types


def state_steps(batch: Batch) -> list[StateStep]:
    """Return the state slots of each item, for a model with recurrent layers."""
    steps = [item.states for item in batch.items]
    assert None not in steps, "a request without slots for its states"
    return cast(list[StateStep], steps)


class InputBatch:
    """Builds the ``StepInputs`` of batches."""

    def __init__(
        self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, num_groups: int = 1
    ):
        self._block_size = block_size
        self._tables = BlockTables(max_num_seqs, max_blocks_per_seq, block_size, num_groups)

    def build(self, batch: Batch) -> StepInputs:
        """Return the arrays of a batch, which stay valid when the next one is built."""
        token_ids, starts, counts, rows, num_blocks, parents, sink_windows = flatten(
            batch, self._tables
        )
        size = self._block_size
        first = np.array(starts, dtype=np.int64)
        lengths = np.array(counts, dtype=np.int64)
        query_start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start[1:])
        tables = self._tables.array[:, rows, :num_blocks]
        if len(token_ids) == len(counts):  # one token each: nothing to repeat
            places = first
            seq_of_token = np.arange(len(counts))
        else:
            seq_of_token = np.repeat(np.arange(len(counts)), lengths)
            places = np.arange(len(token_ids)) + (first - query_start[:-1])[seq_of_token]
        slots = tables[:, seq_of_token, places // size].astype(np.int64) * size + places % size
        return StepInputs(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=_positions(_wrapped_positions(places, seq_of_token, sink_windows), parents),
            slot_mapping=slots,
            query_start=query_start,
            seq_lens=(first + lengths).astype(np.int32),
            block_tables=tables,
            parents=np.array(parents, dtype=np.int32) if parents else None,
            sink_windows=sink_windows or None,
        )


def _wrapped_positions(
    places: np.ndarray, seq_of_token: np.ndarray, sink_windows: Sequence[StepSinkWindow | None]
) -> np.ndarray:
    """Return the positions of tokens by their KV slots; those of endless requests wrap around."""
    if not sink_windows:
        return places
    left_out = np.array([0 if each is None else each.left_out for each in sink_windows])
    turn = np.array([_ENDLESS if each is None else each.sink_window.turn for each in sink_windows])
    positions: np.ndarray = (places + left_out[seq_of_token]) % turn[seq_of_token]
    return positions


def _positions(places: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """Return the positions of tokens by their KV slots; tokens of a tree follow their parents."""
    if not parents:
        return places
    positions = places.copy()
    for row, parent in enumerate(parents):
        if parent >= 0:
            positions[row] = positions[parent] + 1
    return positions
