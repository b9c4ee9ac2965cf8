"""Messages from the home rank of an engine to its followers: flat int32 words.

A message is what a follower needs to do its part of a step with its own weights and KV: the tokens
of a step, where their sequences are, and the entries of block tables that have changed. A follower
knows no requests and no sampling. The same words serve ranks on one machine and on several::

    STEP      header, token ids [T], ends of rows [S] unless each sequence has one token,
              KV lengths [S], rows of tables [S], rows of the head [R],
              which of these need logits, in bytes [R],
              parents [T], sink windows [S, 6], state slots [2, S]     where there are any
              sequences of each rank [ranks]      where attention is divided by sequences
              changes of tables: (group, row, first, count, entries ...)
    COPY      pairs of blocks, from and to
    MOVE      target slot, number of sources, sources ..., block table ...
    EXIT      number of layers of a further program

Nothing in a message is believed: `Reader` raises `BadMessage` for counts and indices that do not
fit, and the native kernels check blocks, tokens and lengths again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STEP, COPY, MOVE, EXIT = range(1, 5)

HAS_PARENTS, HAS_SINK_WINDOWS, HAS_STATES, HAS_OWNERS = 1, 2, 4, 8
SINK_WINDOW_WORDS = 6


class BadMessage(Exception):
    """Raised where a message cannot be one of the home rank; says what does not fit."""


class StepHeader(NamedTuple):
    """The first words of a step's message, behind its kind. ``number``: of the step in a pipeline,
    0 elsewhere. ``program``: 0 is the model's, others are those of ``EXIT`` in their order."""

    number: int
    program: int
    num_seqs: int
    num_tokens: int
    num_out: int
    num_multi_steps: int
    head_only: int
    num_positions: int  # that rope tables must have
    num_blocks: int  # of the longest table
    flags: int
    num_changes: int


class TableChange(NamedTuple):
    """New entries of a block table, from ``first`` on."""

    group: int
    row: int
    first: int
    entries: np.ndarray


def change_words(group: int, row: int, first: int, entries: Sequence[int]) -> list[int]:
    return [group, row, first, len(entries), *entries]


def copy_words(copies: Sequence[tuple[int, int]]) -> array[int]:
    return array("i", [COPY, *(block for pair in copies for block in pair)])


def move_words(block_ids: Sequence[int], sources: Sequence[int], target: int) -> array[int]:
    return array("i", [MOVE, target, len(sources), *sources, *block_ids])


class Reader:
    """Reads a message, int32 words, from its beginning to its end."""

    def __init__(self, words: np.ndarray):
        self._words = words
        self._at = 0

    @property
    def num_left(self) -> int:
        return len(self._words) - self._at

    def take(self, count: int) -> np.ndarray:
        """Return the next words. BadMessage if there are not so many."""
        if not 0 <= count <= self.num_left:
            raise BadMessage(f"{count} words are announced, and {self.num_left} are left")
        self._at += count
        return self._words[self._at - count : self._at]

    def number(self, what: str, least: int, most: int) -> int:
        """Return the next word. BadMessage if it is not one of ``least`` ... ``most``."""
        value = int(self.take(1)[0])
        if not least <= value <= most:
            raise BadMessage(f"{what} is {value}, and not one of {least} to {most}")
        return value

    def header(self) -> StepHeader:
        return StepHeader(*self.take(len(StepHeader._fields)).tolist())

    def change(self, num_groups: int, num_rows: int, length: int) -> TableChange:
        """Return the next change of tables [groups, rows, length]."""
        group = self.number("the group of a table", 0, num_groups - 1)
        row = self.number("the row of a table", 0, num_rows - 1)
        first = self.number("the first new entry of a table", 0, length)
        count = self.number("the number of new entries", 0, length - first)
        return TableChange(group, row, first, self.take(count))

    def end(self) -> None:
        """BadMessage if words are left over."""
        if self.num_left:
            raise BadMessage(f"{self.num_left} words are left over")
