"""What the host tells a GPU of a step: 32-bit words, in one copy.

What the device can know by itself, it is not told again. It mirrors the block table of each running
request in a row of its own, the request's *seat*, and is told of the entries that are new; and it
keeps the token that was sampled last in each seat, so that a step may begin before the host knows
the token that it goes on from, which it then calls -1 - seat::

    host      [ tokens | positions | slots | ... | rows | records | cells | values ]
                                    | one copy, as long as it needs to be
    device    [ tokens | positions | slots | ... | rows | records ] cells, values -> mirror
                    |  placeholders: from the last tokens       mirror, seq_slots -> tables of the step

Where groups of layers have block tables of their own, there are slots for each of them, and a row
of the mirror has the tables of a request side by side: a step costs the device no launch more.
What is gone from a table (``core/kv_tables.py``) is block 0 there, or still what it was, since no
query looks at it.

A record says how a row becomes a token (``kernels/cuda/sampling.py``).

Sections lie where the shape of a step says, so that work that was captured for a shape finds them
there. A shape may be larger than its batch: tokens that are too many write nothing (slot -1), and
sequences have none (length 0) and the seat that nobody has.
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

_ALIGNMENT = 4  # words
_NO_RECORDS = np.zeros((0, RECORD_WORDS), np.int32)


@dataclass(frozen=True, slots=True)
class StepShape:
    """How much a step computes, with what only fills it up."""

    num_tokens: int
    num_seqs: int
    num_rows: int  # that become tokens
    max_query: int  # tokens of a sequence at most

    @classmethod
    def decode(cls, num_seqs: int) -> StepShape:
        """A token and a row for each sequence."""
        return cls(num_seqs, num_seqs, num_seqs, 1)

    def sections(self, num_groups: int) -> list[int]:
        """Tokens, positions, the slots of each group, starts, lengths, seq_slots; rows, their seq_slots and
        records."""
        tokens, seqs, rows = self.num_tokens, self.num_seqs, self.num_rows
        of_tokens = [tokens] * (2 + num_groups)
        return [*of_tokens, seqs + 1, seqs, seqs, rows, rows, rows * RECORD_WORDS]

    def num_words(self, num_groups: int) -> int:
        """All of them, each from a multiple of 16 bytes on."""
        return sum(map(aligned, self.sections(num_groups)))


@dataclass(frozen=True, slots=True)
class StepViews:
    """The sections of a step on the device: int32, over S sequences and R rows."""

    step: StepTensors
    seq_slots: Tensor  # [S]
    tables: Tensor  # [S, groups, width]: those of the step, which are views of it
    rows: Tensor  # [R] of the step that become tokens
    row_slots: Tensor  # [R], in which these tokens are the last; for a draft's, that of nobody
    records: Tensor  # [R, RECORD_WORDS]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """What of a step lies in a buffer of the host, to be copied."""

    shape: StepShape
    num_words: int
    num_cells: int


class DeviceInputs:
    """The memory of all steps' inputs, on a device and in the host's buffers.

    Methods that compute on the device are to be launched on a stream.

    Args:
        num_groups: of layers with block tables of their own.
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
        num_slots = max_num_seqs + 1  # one is nobody's
        largest = StepShape(max_tokens, max_num_seqs, max(max_tokens, max_num_seqs), 1)
        self.num_words = largest.num_words(num_groups) + 2 * num_slots * num_groups * width
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        per_slot = num_groups, width
        self._mirror = torch.zeros(num_slots, *per_slot, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_num_seqs, *per_slot, dtype=torch.int32, device=device)
        self._memory = torch.zeros(self.num_words, dtype=torch.int32, device=device)
        self._views: dict[StepShape, StepViews] = {}  # of decode: there is one for each size

    def stage(
        self,
        batch: Batch,
        rows: Sequence[int],
        records: np.ndarray,
        buffer: Tensor,
        padded: StepShape | None = None,
    ) -> StagedStep:
        """Write a batch into a buffer of the host, int32 [num_words].

        Args:
            rows: R of them, that become tokens, in the order of items.
            records: int32 [R, RECORD_WORDS].
            padded: a shape that holds the batch, as of decoding, where all tokens become tokens; by
                default there is no padding.

        Raises:
            EngineError: a draft is a tree.
        """
        self.device_slots.forget((*batch.finished_ids, *batch.preempted_ids))
        lists = _StepLists.of(batch, self.device_slots, self._block_size)
        shape = padded or StepShape(
            len(lists.token_ids), len(lists.seq_slots), len(rows), lists.max_query
        )
        words, changes = buffer.numpy(), self.device_slots.take_changes()
        num_words = shape.num_words(self._num_groups)
        _write(words, lists.laid_out(shape, rows, self.device_slots.padding))
        own = words[num_words - aligned(shape.num_rows * RECORD_WORDS) :]
        own[: records.size] = records.reshape(-1)
        own[records.size : shape.num_rows * RECORD_WORDS] = 0  # the likeliest token
        _write(words[num_words:], [*changes, *changes.values()])
        return StagedStep(shape, num_words, len(changes))

    def stage_padding(self, shape: StepShape, buffer: Tensor) -> StagedStep:
        """Write a step of nobody, to be run for its own sake."""
        return self.stage(Batch(-1, ()), [], _NO_RECORDS, buffer, shape)

    def upload(self, staged: StagedStep, buffer: Tensor) -> None:
        """Copy a staged step to the device, and bring the mirrored tables up to date."""
        first, count = staged.num_words, staged.num_cells
        end = first + 2 * count
        self._memory[:end].copy_(buffer[:end], non_blocking=True)
        if count:
            cells = self._memory[first : first + count].long()
            self._mirror.view(-1)[cells] = self._memory[first + count : end]

    def gather_tables(self, views: StepViews) -> None:
        """Put the block tables of a step together. May be captured."""
        torch.index_select(self._mirror, 0, views.seq_slots, out=views.tables)

    def views(self, shape: StepShape) -> StepViews:
        """Where the inputs of steps of a shape are."""
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
            if shape == StepShape.decode(shape.num_seqs):
                self._views[shape] = views
        return views

    def _sections(self, shape: StepShape) -> Iterator[Tensor]:
        """Those of a shape, on the device."""
        lengths = shape.sections(self._num_groups)
        end = shape.num_words(self._num_groups)
        sections = self._memory[:end].split([*map(aligned, lengths)])
        return (section[:length] for section, length in zip(sections, lengths, strict=True))


class DeviceSlots:
    """Which row of the device's arrays each running request has, and what is new in its tables.

    Args:
        width: the blocks of a table at most.
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
        """The seat of a request; changes of its tables are noted."""
        slot = self._slot_of.get(request.request_id)
        if slot is None:
            slot = self._assign(self._free.pop(), request)
        elif slot.request is not request or slot.num_preemptions != request.num_preemptions:
            # It left and came back, and nobody has told us.
            slot = self._assign(slot.index, request)
        # What was published by then has not changed since, but for what is gone, where no query
        # looks any more: mostly nothing is left to compare.
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
        """Note what is new of a table from its entry ``first`` on."""
        written = slot.tables[group]
        both = min(len(written), len(table))
        while first < both and written[first] == table[first]:
            first += 1
        written[first:] = table[first:]
        base = (slot.index * self.num_groups + group) * self._width
        blocks = [0 if block_id == GONE else block_id for block_id in table[first:]]
        self._changes.update(zip(range(base + first, base + len(table)), blocks, strict=True))

    def take_changes(self) -> dict[int, int]:
        """Entries that have changed since the last call, by their places in all tables, laid end to
        end."""
        changes, self._changes = self._changes, {}
        return changes

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the seq_slots of requests that have left the batch."""
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
        self.num_settled = 0  # entries that stay as they are


class _StepLists(NamedTuple):
    """A batch as lists, laid end to end: entries of tensors are slow to set one by one."""

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
        lists = cls([], [], [], [0], [], [], [], _power_of_two(batch))
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
        """All sections of a step but its records, filled up to where the next one begins."""
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


def _power_of_two(batch: Batch) -> int:
    """The tokens of an item at most, rounded up."""
    most = max([item.num_tokens for item in batch.items], default=1)
    return 1 << (most - 1).bit_length()


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
    """Where the keys and values of a batch go, in the layers of a group."""
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
    """The slots of positions, block by block."""
    while start < end:
        slot = table[start // size] * size + start % size
        count = min(size - start % size, end - start)
        yield range(slot, slot + count)
        start += count


def _write(words: np.ndarray, values: list[int]) -> None:
    words.data[: len(values)] = memoryview(array("i", values))


def aligned(length: int) -> int:
    """So many words and a few more, so that what comes next begins at 16 bytes: kernels may read as
    many at once, and are compiled again where they may not."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT
