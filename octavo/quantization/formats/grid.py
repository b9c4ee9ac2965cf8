"""Scales and zeros of blocks of a matrix: one for all, for each row, for groups or for tiles."""

from __future__ import annotations

import numpy as np

from octavo.quantization.formats.stored import StoredTensor


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def of_blocks(stored: StoredTensor, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """Read one number for each block of a matrix, as a CodedWeight has them: float32
    [N or 1, groups].

    Args:
        stored: [blocks down, blocks across]; dimensions of 1 may be missing.
        shape: of the matrix, (N, K).
        block: its rows and columns; blocks at the edges may be cut off.

    Raises:
        ModelFileError: the shape of ``stored`` is another one.
    """
    grid = ceil_div(shape[0], block[0]), ceil_div(shape[1], block[1])
    if [n for n in stored.shape if n != 1] != [n for n in grid if n != 1]:
        raise stored.error(
            f"the shape is {list(stored.shape)}, not {list(grid)}: there is one for each block of "
            f"{block[0]} x {block[1]} of {shape[0]} x {shape[1]} values"
        )
    numbers = stored.floats().reshape(grid)
    if grid[0] == 1 or block[0] == 1:
        return numbers
    return np.repeat(numbers, block[0], axis=0)[: shape[0]]


def one_or_all(numbers: np.ndarray) -> np.ndarray | float:
    """A single number if all are equal, which takes less memory and time; else all of them."""
    if numbers.size and (numbers == numbers.flat[0]).all():
        return float(numbers.flat[0])
    return numbers
