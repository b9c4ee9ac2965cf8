"""The blocks that a sequence keeps, of all its tokens or of those in a sliding window.

Layers with the same window share a block table; a *group* of them is known here by its window, None
for layers that attend to all positions. A token takes as much memory in every group, so that a
block serves any of them (the idea is that of vLLM's hybrid KV cache)::

    window  the table of a sequence of 10 tokens, in blocks of 2
    None    [ 7 ][ 3 ][ 8 ][ 9 ][ 1 ]
    3       [ - ][ - ][ - ][ 4 ][ 6 ]      the next query, at 10, sees 8 and 9

All tables of a sequence are indexed alike; an entry whose slots no query can attend to any more is
``GONE``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

GONE = -1

# The window of each group; groups without one come first.
Windows: TypeAlias = Sequence[int | None]

ONE_TABLE: Windows = (None,)


def first_kept(window: int | None, num_tokens: int, block_size: int) -> int:
    """Return the first block that is kept of ``num_tokens`` tokens, when the next query follows
    them.

    The last full block is always kept: the next block to be published is its successor.
    """
    if window is None:
        return 0
    return max(0, min((num_tokens - window + 1) // block_size, num_tokens // block_size - 1))


def served_counts(
    windows: Windows, rows: Iterable[Sequence[bool]], block_size: int, first: int = 0
) -> Iterator[int]:
    """Yield the numbers of blocks after which a sequence can go on: every group has the blocks that
    its window attends to then. ``rows`` say of one block after the other, from ``first`` on, which
    groups have it."""
    in_a_row = [first] * len(windows)  # blocks that each group has, up to here
    for count, row in enumerate(rows, start=first + 1):
        in_a_row = [(have + 1) * is_there for have, is_there in zip(in_a_row, row, strict=True)]
        if windows[0] is None and in_a_row[0] < count:
            return
        if all(
            have >= count - first_kept(window, count * block_size, block_size)
            for window, have in zip(windows, in_a_row, strict=True)
        ):
            yield count


def most_blocks(windows: Windows, num_tokens: int, block_size: int, step_tokens: int) -> int:
    """Return the largest number of blocks that a sequence of ``num_tokens`` holds at once, if no
    step adds more than ``step_tokens`` to it."""
    whole = -(-num_tokens // block_size)
    return sum(min(whole, _most_of_window(w, block_size, step_tokens, whole)) for w in windows)


def _most_of_window(window: int | None, block_size: int, step_tokens: int, whole: int) -> int:
    if window is None:
        return whole
    # Blocks are given back when one is full, so almost a block of tokens beyond the window may
    # still be held, and the last full block is.
    kept = max(window - 1, block_size) + block_size - 1
    return -(-(kept + step_tokens) // block_size) + 1


def longest_sequence(
    windows: Windows, num_blocks: int, block_size: int, step_tokens: int, limit: int
) -> int:
    """Return the tokens of the longest sequence that so many blocks can hold, up to ``limit``."""
    if tuple(windows) == ONE_TABLE:
        return min(limit, num_blocks * block_size)
    lengths = range(1, -(-limit // block_size) + 1)  # in blocks
    fit = bisect_right(
        lengths,
        num_blocks,
        key=lambda length: most_blocks(windows, length * block_size, block_size, step_tokens),
    )
    return min(limit, fit * block_size)
