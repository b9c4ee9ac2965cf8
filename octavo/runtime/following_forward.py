"""The forward passes of a follower in a tensor-parallel group, which does what rank 0 says.

A follower has its part of the weights and of the KV cache, and mirrors the block tables of rank 0
from their changes. ``leading_forward.py`` writes the messages that it obeys.
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from collections.abc import Sequence

import numpy as np

from octavo.base.errors import StepAbortedError
from octavo.core.sink_window import most_angles
from octavo.kernels.cpu import abi
from octavo.runtime.native_forward import NativeForward
from octavo.runtime.stage_links import StepMessages
from octavo.runtime.step_words import (
    COPY,
    EXIT,
    HAS_OWNERS,
    HAS_PARENTS,
    HAS_SINK_WINDOWS,
    HAS_STATES,
    MOVE,
    SINK_WINDOW_WORDS,
    STEP,
    BadMessage,
    Reader,
    StepHeader,
)


class FollowingForward(NativeForward):
    """The steps of one program, from messages."""

    def _make_arguments(self) -> abi.Batch:
        arguments = super()._make_arguments()
        self._needed = bytearray(-(-len(self._out_rows) // 4) * 4)
        arguments.samples = arguments.logits = arguments.tokens = arguments.status = None
        arguments.needs_logits = ctypes.addressof(ctypes.c_char.from_buffer(self._needed))
        return arguments

    def exit_after(self, num_layers: int) -> FollowingForward:
        program = self._exit_program(num_layers)
        return FollowingForward(program, self.cache, self.limits, self._share_prefixes)

    def run(self, header: StepHeader, reader: Reader) -> None:
        """Run a step. BadMessage if it does not fit the sizes that this rank was started with."""
        self._check_sizes(header)
        most_positions = header.num_blocks * self.cache.block_size + header.num_multi_steps
        arguments, sequences = self._arguments, self._arguments.seqs
        num_seqs, num_tokens, num_out = header.num_seqs, header.num_tokens, header.num_out
        self._token_ids[:num_tokens] = _words(reader, num_tokens)
        if num_tokens == num_seqs:
            self._query_start[: num_seqs + 1] = array("i", range(num_seqs + 1))
        else:
            self._query_start[1 : num_seqs + 1] = ends = _words(reader, num_seqs)
            if ends[-1] != num_tokens:
                raise BadMessage(f"sequences end at row {ends[-1]} of {num_tokens}")
        self._kv_len[:num_seqs] = _words(reader, num_seqs)
        rows = reader.take(num_seqs).tolist()
        if not 0 <= min(rows) <= max(rows) < self.limits.max_num_seqs:
            raise BadMessage(f"rows of block tables beyond {self.limits.max_num_seqs}")
        self._out_rows[:num_out] = _words(reader, num_out)
        needed = _words(reader, -(-num_out // 4)).tobytes()
        self._needed[: len(needed)] = needed
        sequences.parents = sequences.sink_windows = None
        if header.flags & HAS_PARENTS:
            self._parents[:num_tokens] = _words(reader, num_tokens)
            sequences.parents = self._parents.buffer_info()[0]
        if header.flags & HAS_SINK_WINDOWS:
            windows = _words(reader, SINK_WINDOW_WORDS * num_seqs).tobytes()
            ctypes.memmove(self._sink_windows, windows, len(windows))
            sequences.sink_windows = ctypes.addressof(self._sink_windows)
            turns = max(each.turn + each.window for each in self._sink_windows[:num_seqs])
            most_positions = max(most_positions, min(turns, most_angles(self.limits.max_model_len)))
        if header.flags & HAS_STATES:
            self._state_source[:num_seqs] = _words(reader, num_seqs)
            self._state_target[:num_seqs] = _words(reader, num_seqs)
        self._take_owners(header, reader)
        for _ in range(header.num_changes):
            change = reader.change(*self._tables.array.shape)
            end = change.first + len(change.entries)
            self._tables.array[change.group, change.row, change.first : end] = change.entries
        reader.end()
        if header.head_only:
            most_positions = 0  # the head alone rotates nothing
        if not 0 <= header.num_positions <= most_positions:
            raise BadMessage(
                f"{header.num_positions} positions of a step that has {most_positions}"
            )
        sequences.num_seqs, sequences.num_tokens = num_seqs, num_tokens
        self._point_at_tables(rows, header.num_blocks)
        arguments.num_out, arguments.head_only = num_out, header.head_only
        arguments.num_multi_steps = header.num_multi_steps
        self._compute(header)

    def _take_owners(self, header: StepHeader, reader: Reader) -> None:
        """Take whose sequences are whose: here, all are of all."""
        if header.flags & HAS_OWNERS:
            raise BadMessage("sequences of single ranks, where attention is divided by heads")

    def _compute(self, header: StepHeader) -> None:
        """Compute the step that is written."""
        self._step(header.num_positions)

    def _check_sizes(self, header: StepHeader) -> None:
        limits = self.limits
        most_tokens = limits.max_num_batched_tokens
        most_steps = max(1, len(self._tokens) // max(1, header.num_tokens))
        most_blocks = self._tables.array.shape[-1]
        for what, value, least, most in (
            ("tokens", header.num_tokens, 1, most_tokens),
            ("sequences", header.num_seqs, 1, min(limits.max_num_seqs, header.num_tokens)),
            ("rows of the head", header.num_out, 0, min(len(self._out_rows), most_tokens)),
            ("decode steps", header.num_multi_steps, 1, most_steps),
            ("blocks of a table", header.num_blocks, 0, most_blocks),
            ("changes of tables", header.num_changes, 0, self._tables.array[..., 0].size * 2),
        ):
            if not least <= value <= most:
                raise BadMessage(f"a step of {value} {what}: {least} to {most} are possible")


class Follower:
    """All that a follower computes: it obeys messages until the group ends."""

    def __init__(self, forward: FollowingForward):
        self._forwards = [forward]
        self._cache, self._limits = forward.kv_cache, forward.limits

    def obey(self, words: np.ndarray) -> None:
        """Do what a message says. BadMessage if it cannot be done."""
        reader = Reader(words)
        match reader.number("the kind of a message", STEP, EXIT):
            case kind if kind == STEP:
                header = reader.header()
                if not 0 <= header.program < len(self._forwards):
                    raise BadMessage(f"there is no program {header.program}")
                self._forwards[header.program].run(header, reader)
            case kind if kind == COPY:
                blocks = reader.take(reader.num_left).tolist()
                if len(blocks) % 2:
                    raise BadMessage(f"blocks are copied in pairs, and these are {len(blocks)}")
                self._check_blocks(blocks)
                self._cache.copy_blocks(zip(blocks[::2], blocks[1::2], strict=True))
            case kind if kind == MOVE:
                target = reader.number("the target of a move", 0, 2**31 - 1)
                sources = reader.take(reader.number("a count", 0, reader.num_left)).tolist()
                table = reader.take(reader.num_left).tolist()
                self._check_blocks(table)
                slots = len(table) * self._forwards[0].cache.block_size
                if not all(0 <= slot < slots for slot in (*sources, target + len(sources) - 1)):
                    raise BadMessage(f"KV is moved beyond the {slots} slots of a sequence")
                self._cache.move(table, sources, target)
            case _:
                self._forwards.append(self._exit_after(reader))

    def _exit_after(self, reader: Reader) -> FollowingForward:
        num_layers = reader.number("a number of layers", 1, 1 << 16)
        return self._forwards[0].exit_after(num_layers)

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        most = self._cache.num_blocks + self._limits.num_host_blocks
        if len(blocks) and not (min(blocks) >= 0 and max(blocks) < most):
            raise BadMessage(f"blocks beyond the {most} that there are")


def follow(messages: StepMessages, follower: Follower) -> None:
    """Obey the messages of the home rank until there are no more.

    Raises:
        BadMessage: one of them cannot be obeyed. PeerEndedError: the group has ended.
    """
    while True:
        with contextlib.suppress(StepAbortedError):  # the home rank goes on, if anything does
            follower.obey(messages.receive())


def _words(reader: Reader, count: int) -> array[int]:
    words = array("i")
    words.frombytes(reader.take(count).tobytes())
    return words
