"""The inputs of a step on a GPU: 32-bit words, uploaded in one copy.

The device keeps what does not change from step to step. It mirrors the block table of each running
request in a row of its own, the request's *slot*, of which only new entries are uploaded; and it
keeps the last sampled token of each slot, so that a step may begin before the host knows the token
that it goes on from, for which the host writes the placeholder -1 - slot::

    host      [ tokens | positions | slots | ... | rows | records | cells | values ]
                                    | one copy, as long as it needs to be
    device    [ tokens | positions | slots | ... | rows | records ] cells, values -> mirror
                    |  placeholders: from the last tokens       mirror, slots -> tables of the step

Where groups of layers have block tables of their own, each group has its own KV slots, and a row of
the mirror has the tables of a request side by side, so that a step takes no further launch. Blocks
that have left a table (``core/kv_tables.py``) are block 0 there, or stale: no query reads them.

A record has the sampling parameters of a row (``kernels/cuda/sampling.py``).

The offsets of sections depend only on the shape of a step, so that a graph captured for a shape
finds them. A shape may be larger than its batch: padding tokens have KV slot -1 and write nothing,
padding sequences have length 0 and the padding slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.base.errors import EngineError
from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.kv_tables import GONE
from octavo.core.request import Request
from octavo.kernels.cuda.ops import StepTables, StepTensors
from octavo.kernels.cuda.sampling import RECORD_WORDS
from octavo.runtime.step_shapes import StepShape, power_of_two
from octavo.runtime.step_words import BadMessage

_ALIGNMENT = 4  # words
_NO_RECORDS = np.zeros((0, RECORD_WORDS), np.int32)


@dataclass(frozen=True, slots=True)
class StepViews:
    """The sections of a step on the device: int32, for S sequences and R rows."""

    step: StepTensors
    seq_slots: Tensor  # [S]
    tables: Tensor  # [S, groups, width], of which the tables of ``step`` are views
    rows: Tensor  # [R], the rows that are sampled
    row_slots: Tensor  # [R], the slots that keep their tokens; padding for rows of drafts
    records: Tensor  # [R, RECORD_WORDS]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """The inputs of a step in a host buffer, ready to be copied to the device."""

    shape: StepShape
    num_words: int
    num_cells: int


class DeviceInputs:
    """The device memory of step inputs, which all steps share, and the writer of host buffers.

    ``upload`` and ``gather_tables`` compute on the device, and must be launched on a stream.

    Args:
        num_groups: the number of layer groups with block tables of their own.
    """

    def __init__(
        self,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
        block_size: int,
        num_groups: int = 1,
    ):
        width = aligned(-(-max_model_len // block_size))
        self.device_slots = DeviceSlots(max_num_seqs, width, num_groups)
        self._block_size, self._num_groups = block_size, num_groups
        self._max_model_len = max_model_len
        num_slots = max_num_seqs + 1  # the last one is padding
        largest = StepShape(max_tokens, max_num_seqs, max(max_tokens, max_num_seqs), 1)
        self.num_words = _num_words(largest, num_groups) + 2 * num_slots * num_groups * width
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        per_slot = num_groups, width
        self._mirror = torch.zeros(num_slots, *per_slot, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_num_seqs, *per_slot, dtype=torch.int32, device=device)
        self._memory = torch.zeros(self.num_words, dtype=torch.int32, device=device)
        self._views: dict[StepShape, StepViews] = {}  # of decode steps, by size

    def stage(
        self,
        batch: Batch,
        rows: Sequence[int],
        records: np.ndarray,
        buffer: Tensor,
        padded: StepShape | None = None,
    ) -> StagedStep:
        """Write the inputs of a batch into a host buffer, int32 [num_words].

        Args:
            rows: the R rows that are sampled, in the order of items.
            records: their sampling records, int32 [R, RECORD_WORDS].
            padded: a larger shape to pad the batch to; None for no padding.

        Raises:
            EngineError: a draft is a tree.
        """
        self.device_slots.forget((*batch.finished_ids, *batch.preempted_ids))
        lists = _StepLists.of(batch, self.device_slots, self._block_size)
        shape = padded or StepShape(
            len(lists.token_ids), len(lists.seq_slots), len(rows), lists.max_query
        )
        words, changes = buffer.numpy(), self.device_slots.take_changes()
        num_words = _num_words(shape, self._num_groups)
        _write(words, lists.laid_out(shape, rows, self.device_slots.padding))
        own = words[num_words - aligned(shape.num_rows * RECORD_WORDS) :]
        own[: records.size] = records.reshape(-1)
        own[records.size : shape.num_rows * RECORD_WORDS] = 0  # greedy
        _write(words[num_words:], [*changes, *changes.values()])
        return StagedStep(shape, num_words, len(changes))

    @property
    def num_cells(self) -> int:
        """The most cells of block tables that a step can change."""
        return self._mirror.numel()

    def num_words_of(self, shape: StepShape) -> int:
        """Return the words of a step before its cells."""
        return _num_words(shape, self._num_groups)

    def num_words_to_records(self, shape: StepShape) -> int:
        """Return the words of a step before its sampling records."""
        return self.num_words_of(shape) - aligned(shape.num_rows * RECORD_WORDS)

    def check(
        self, shape: StepShape, words: np.ndarray, cells: np.ndarray, num_blocks: int, vocab: int
    ) -> None:
        """Check a step that another process has staged.

        Args:
            words: up to its sampling records.
            cells: changed cells of block tables, and behind them their values.
            num_blocks: that there are.

        Raises:
            BadMessage: an index is beyond what there is.
        """
        *lengths, _ = _sections(shape, self._num_groups)
        ends = np.cumsum([0, *map(aligned, lengths)])
        sections = [
            words[begin : begin + length] for begin, length in zip(ends, lengths, strict=False)
        ]
        tokens, positions, *slots, starts, seq_lens, seq_slots, rows, row_slots = sections
        last_slot, longest = self.device_slots.padding, self._max_model_len
        for what, numbers, least, most in (
            ("tokens", tokens, -1 - last_slot, vocab - 1),
            ("positions", positions, 0, longest - 1),
            *(("KV slots", each, -1, num_blocks * self._block_size - 1) for each in slots),
            ("starts", starts, 0, shape.num_tokens),
            ("lengths", seq_lens, 0, longest),
            ("slots", seq_slots, 0, last_slot),
            ("rows", rows, 0, shape.num_tokens - 1),
            ("slots of rows", row_slots, 0, last_slot),
            ("cells", cells[: len(cells) // 2], 0, self.num_cells - 1),
            ("blocks", cells[len(cells) // 2 :], 0, num_blocks - 1),
        ):
            if len(numbers) and not least <= numbers.min() <= numbers.max() <= most:
                raise BadMessage(f"{what} beyond {least} to {most}")
        counts = np.diff(starts)
        if starts[0] or not 0 <= counts.min() <= counts.max() <= shape.max_query:
            raise BadMessage("sequences do not begin one behind the other")
        if (seq_lens < counts).any():
            raise BadMessage("sequences are shorter than their tokens of this step")

    def stage_padding(self, shape: StepShape, buffer: Tensor) -> StagedStep:
        """Write the inputs of a step that is all padding, for warming up and capturing."""
        return self.stage(Batch(-1, ()), [], _NO_RECORDS, buffer, shape)

    def upload(self, staged: StagedStep, buffer: Tensor) -> None:
        """Copy a staged step to the device, and update the mirrored block tables."""
        first, count = staged.num_words, staged.num_cells
        end = first + 2 * count
        self._memory[:end].copy_(buffer[:end], non_blocking=True)
        if count:
            cells = self._memory[first : first + count].long()
            self._mirror.view(-1)[cells] = self._memory[first + count : end]

    def gather_tables(self, views: StepViews) -> None:
        """Gather the block tables of a step from the mirror. May be captured in a graph."""
        torch.index_select(self._mirror, 0, views.seq_slots, out=views.tables)

    def views(self, shape: StepShape) -> StepViews:
        """Return views of the inputs of a step by its shape."""
        views = self._views.get(shape)
        if views is None:
            (
                token_ids,
                positions,
                *slots,
                starts,
                lengths,
                seq_slots,
                rows,
                row_slots,
                records,
            ) = self._sections(shape)
            tables = self._tables[: shape.num_seqs]
            of_groups = [StepTables(table, starts, lengths) for table in tables.unbind(1)]
            step = StepTensors(token_ids, positions, slots, of_groups, shape.max_query)
            views = StepViews(
                step, seq_slots, tables, rows, row_slots, records.view(-1, RECORD_WORDS)
            )
            if shape.is_decode:
                self._views[shape] = views
        return views

    def _sections(self, shape: StepShape) -> Iterator[Tensor]:
        """Yield the sections of a shape on the device."""
        lengths = _sections(shape, self._num_groups)
        end = _num_words(shape, self._num_groups)
        sections = self._memory[:end].split([*map(aligned, lengths)])
        return (section[:length] for section, length in zip(sections, lengths, strict=True))


class DeviceSlots:
    """The slots of running requests in the device's arrays, and changes of their block tables.

    Args:
        count: the number of slots; the slot after them, ``padding``, belongs to no request.
        width: the most blocks of a table.
        num_groups: the tables of a request, which lie side by side.
    """

    def __init__(self, count: int, width: int, num_groups: int = 1):
        self.padding = count
        self.num_groups = num_groups
        self._width = width
        self._free = list(range(count - 1, -1, -1))
        self._slot_of: dict[str, _DeviceSlot] = {}
        self._changes: dict[int, int] = {}

    def of(self, request: Request) -> int:
        """Return the slot of a request, and record the changes of its block tables."""
        slot = self._slot_of.get(request.request_id)
        if slot is None:
            slot = self._assign(self._free.pop(), request)
        elif slot.request is not request or slot.num_preemptions != request.num_preemptions:
            # It was removed and added again without ``forget``.
            slot = self._assign(slot.index, request)
        # Published blocks do not change, but for those that have left the window, which no query
        # reads: so mostly nothing is left to compare.
        written, table, first = slot.tables[0], request.block_ids, slot.num_settled
        slot.num_settled = request.num_published_blocks
        if len(written) != len(table) or written[first:] != table[first:]:
            self._note(slot, 0, table, first)
        if request.further_tables:
            for group, table in enumerate(request.further_tables, start=1):
                written = slot.tables[group]
                if len(written) != len(table) or written[first:] != table[first:]:
                    self._note(slot, group, table, first)
        return slot.index

    def _assign(self, index: int, request: Request) -> _DeviceSlot:
        slot = self._slot_of[request.request_id] = _DeviceSlot(index, request, self.num_groups)
        return slot

    def _note(self, slot: _DeviceSlot, group: int, table: list[int], first: int) -> None:
        """Record the changes of a table from its entry ``first`` on."""
        written = slot.tables[group]
        both = min(len(written), len(table))
        while first < both and written[first] == table[first]:
            first += 1
        written[first:] = table[first:]
        base = (slot.index * self.num_groups + group) * self._width
        blocks = [0 if block_id == GONE else block_id for block_id in table[first:]]
        self._changes.update(zip(range(base + first, base + len(table)), blocks, strict=True))

    def take_changes(self) -> dict[int, int]:
        """Return the entries that have changed since the last call, by their index in the flat
        array of all tables."""
        changes, self._changes = self._changes, {}
        return changes

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the slots of requests that have left the batch."""
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, None)
            if slot is not None:
                self._free.append(slot.index)


class _DeviceSlot:
    __slots__ = ("index", "num_preemptions", "num_settled", "request", "tables")

    def __init__(self, index: int, request: Request, num_groups: int):
        self.index = index
        self.request = request
        self.num_preemptions = request.num_preemptions
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]  # as the device has them
        self.num_settled = 0  # entries that do not change any more


class _StepLists(NamedTuple):
    """A batch as flat lists, because entries of tensors are slow to set one by one."""

    token_ids: list[int]
    positions: list[int]
    slots: list[list[int]]  # of each group
    starts: list[int]
    lengths: list[int]
    seq_slots: list[int]
    row_slots: list[int]
    max_query: int

    @classmethod
    def of(cls, batch: Batch, device_slots: DeviceSlots, block_size: int) -> _StepLists:
        longest = max([item.num_tokens for item in batch.items], default=1)
        lists = cls([], [], [], [0], [], [], [], power_of_two(longest))
        token_ids, positions, slots, starts, lengths, own_slots, row_slots, _ = lists
        slots += (_kv_slots(batch, group, block_size) for group in range(device_slots.num_groups))
        slot_of = device_slots.of
        for item in batch.items:
            request, start, count = item.request, item.start, item.num_tokens
            slot = slot_of(request)
            if count == 1:
                known = request.token_ids
                token_ids.append(known[start] if start < len(known) else -1 - slot)
                positions.append(start)
            else:
                token_ids += _tokens(item, slot)
                positions += range(start, start + count)
            starts.append(len(token_ids))
            lengths.append(start + count)
            own_slots.append(slot)
            if item.num_sampled:
                draft = item.draft
                row_slots += (
                    (slot,) if draft is None else (device_slots.padding,) * (1 + len(draft))
                )
        return lists

    def laid_out(self, shape: StepShape, rows: Sequence[int], padding: int) -> list[int]:
        """Return all sections of a step but its records, padded and aligned."""
        laid: list[int] = []
        for values, length, filler in (
            (self.token_ids, shape.num_tokens, 0),
            (self.positions, shape.num_tokens, 0),
            *((slots, shape.num_tokens, -1) for slots in self.slots),
            (self.starts, shape.num_seqs + 1, len(self.token_ids)),
            (self.lengths, shape.num_seqs, 0),
            (self.seq_slots, shape.num_seqs, padding),
            (rows, shape.num_rows, 0),
            (self.row_slots, shape.num_rows, padding),
        ):
            laid += values
            laid += [filler] * (aligned(length) - len(values))
        return laid


def _tokens(item: ScheduledRequest, slot: int) -> list[int]:
    token_ids = item.request.token_ids[item.start : item.end]
    if len(token_ids) < item.end - item.start:
        token_ids.append(-1 - slot)
    if item.draft is not None:
        if not item.draft.is_chain:
            raise EngineError("this forward pass knows no drafts that are trees")
        token_ids += item.draft.token_ids
    return token_ids


def _kv_slots(batch: Batch, group: int, size: int) -> list[int]:
    """Return the KV slots that a batch writes in the layers of a group."""
    slots: list[int] = []
    for item in batch.items:
        request, start, count = item.request, item.start, item.num_tokens
        table = request.further_tables[group - 1] if group else request.block_ids
        if count == 1:
            slots.append(table[start // size] * size + start % size)
        else:
            for part in _runs(table, start, start + count, size):
                slots += part
    return slots


def _runs(table: list[int], start: int, end: int, size: int) -> Iterator[range]:
    """Yield the KV slots of positions, block by block."""
    while start < end:
        slot = table[start // size] * size + start % size
        count = min(size - start % size, end - start)
        yield range(slot, slot + count)
        start += count


def _sections(shape: StepShape, num_groups: int) -> list[int]:
    """Return the lengths of the sections: tokens, positions, KV slots of each group, starts,
    lengths, slots of sequences; rows, their slots and their records."""
    tokens, seqs, rows = shape.num_tokens, shape.num_seqs, shape.num_rows
    of_tokens = [tokens] * (2 + num_groups)
    return [*of_tokens, seqs + 1, seqs, seqs, rows, rows, rows * RECORD_WORDS]


def _num_words(shape: StepShape, num_groups: int) -> int:
    """Return the words of all sections, each aligned to 16 bytes."""
    return sum(map(aligned, _sections(shape, num_groups)))


def _write(words: np.ndarray, values: list[int]) -> None:
    words.data[: len(values)] = memoryview(array("i", values))


def aligned(length: int) -> int:
    """Round a number of words up to 16 bytes: kernels may read as many at once, and Triton compiles
    them again for arguments that are not aligned."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT
