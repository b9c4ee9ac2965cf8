"""The forward pass of rank 0 of a tensor-parallel group: it tells its followers what it does.

Each step, copy and move of KV becomes a message (``step_words.py``) before rank 0 does its part, so
that all ranks compute at the same time; ``following_forward.py`` is what the others run.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn, Protocol

import numpy as np

from octavo.base.errors import ConfigError
from octavo.kernels.cpu.program import Program
from octavo.runtime.forward import KVBlocks
from octavo.runtime.host_rows import HostRows
from octavo.runtime.input_batch import BlockTables
from octavo.runtime.native_forward import NativeForward
from octavo.runtime.native_kv_cache import NativeCache
from octavo.runtime.stage_links import StepMessages
from octavo.runtime.step_words import (
    EXIT,
    HAS_OWNERS,
    HAS_PARENTS,
    HAS_SINK_WINDOWS,
    HAS_STATES,
    STEP,
    StepHeader,
    change_words,
    copy_words,
    move_words,
)


class RecordedTables(BlockTables):
    """Block tables that keep the changes since they were last sent, as words of a message."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.changes: list[int] = []
        self.num_changes = 0

    def _store(self, group: int, row: int, first: int, entries: Sequence[int]) -> None:
        super()._store(group, row, first, entries)
        self.changes += change_words(group, row, first, entries)
        self.num_changes += 1

    def sent(self) -> None:
        self.changes.clear()
        self.num_changes = 0


class Sender(Protocol):
    """Whatever messages to the followers go through."""

    def send(self, words: array[int]) -> None: ...


class LeadingCache:
    """The KV blocks of rank 0, whose copies and moves all ranks make."""

    def __init__(self, blocks: KVBlocks, messages: Sender):
        self._blocks, self._messages = blocks, messages
        self.host: HostRows | None = None  # where ranks share the host blocks

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def host_blocks(self) -> np.ndarray:
        return self._blocks.host_blocks

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        copies = list(copies)
        if self.host is not None:
            self.host.begin_copies()
        self._messages.send(copy_words(copies))
        self._do(partial(self._blocks.copy_blocks, copies))

    def wait(self) -> None:
        self._blocks.wait()

    def move(self, block_ids: Sequence[int], sources: Sequence[int], target: int) -> None:
        self._messages.send(move_words(block_ids, sources, target))
        self._do(partial(self._blocks.move, block_ids, sources, target))

    def _do(self, action: Callable[[], object]) -> None:
        """Do the part of rank 0, in the order of messages."""
        action()


class LeadingForward(NativeForward):
    """A ``NativeForward`` of which every step is sent to the followers first.

    Args:
        number: of the program in messages: 0 is the model's.
        messages: to the followers; None: those of the program's group, which are all there are.
    """

    _tables: RecordedTables
    kv_cache: LeadingCache
    step_number = 0  # in a pipeline

    def __init__(
        self,
        program: Program,
        kv_cache: NativeCache,
        *more: Any,
        number: int = 0,
        messages: StepMessages | None = None,
    ):
        super().__init__(program, kv_cache, *more)
        to_group = program.group if messages is None else messages
        assert to_group is not None
        self._messages, self._number = to_group, number
        self.kv_cache = LeadingCache(kv_cache, to_group)
        self._numbers = count(number + 1)
        self._owned = array("i")  # sequences of each rank, where attention is divided by them
        self._needed = bytearray(-(-len(self._out_rows) // 4) * 4)
        self._needed_at = ctypes.addressof(ctypes.c_char.from_buffer(self._needed))

    def open_loras(self, dtype: str) -> NoReturn:
        raise ConfigError(
            "adapters: ranks that share a model have none; set tensor_parallel_size and "
            "pipeline_parallel_size to 1"
        )

    def _make_tables(self, *sizes: int) -> RecordedTables:
        return RecordedTables(*sizes)

    def exit_after(self, num_layers: int) -> LeadingForward:
        program = self._exit_program(num_layers)
        self._messages.send(array("i", [EXIT, num_layers]))
        return LeadingForward(
            program, self.cache, self.limits, self._share_prefixes, number=next(self._numbers)
        )

    def _step(self, num_positions: int) -> None:
        self._messages.send(self._message(num_positions))
        self._tables.sent()
        super()._step(num_positions)

    def _message(self, num_positions: int) -> array[int]:
        """Return the words of the step that is written."""
        arguments = self._arguments
        sequences = arguments.seqs
        num_seqs, num_tokens, num_out = sequences.num_seqs, sequences.num_tokens, arguments.num_out
        flags = HAS_PARENTS if sequences.parents else 0
        flags |= HAS_SINK_WINDOWS if sequences.sink_windows else 0
        flags |= HAS_STATES if self.cache.states is not None else 0
        flags |= HAS_OWNERS if self._owned else 0
        header = StepHeader(
            number=self.step_number,
            program=self._number,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_out=num_out,
            num_multi_steps=arguments.num_multi_steps,
            head_only=arguments.head_only,
            num_positions=num_positions,
            num_blocks=self._num_table_blocks,
            flags=flags,
            num_changes=self._tables.num_changes,
        )
        words = array("i", (STEP, *header))
        words += self._token_ids[:num_tokens]
        if num_tokens != num_seqs:
            words += self._query_start[1 : num_seqs + 1]
        words += self._kv_len[:num_seqs]
        words.extend(self._table_rows)
        words += self._out_rows[:num_out]
        self.program.library.lib.oct_needed_logits(ctypes.byref(arguments), self._needed_at)
        words.frombytes(self._needed[: -(-num_out // 4) * 4])
        if flags & HAS_PARENTS:
            words += self._parents[:num_tokens]
        if flags & HAS_SINK_WINDOWS:
            words.frombytes(bytes(memoryview(self._sink_windows).cast("B")[: 24 * num_seqs]))
        if flags & HAS_STATES:
            words += self._state_source[:num_seqs]
            words += self._state_target[:num_seqs]
        words += self._owned
        words.extend(self._tables.changes)
        return words
