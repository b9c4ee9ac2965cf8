"""Values that ranks of the scheme `gather` exchange in a layer."""

from __future__ import annotations

from typing import NamedTuple


class Shared(NamedTuple):
    """Values of one token that all ranks need, and of which each rank computes some.

    Args:
        width: outputs of a matrix, or of all heads.
        times: how many of these there are: of experts, as many as a token uses.
        by_heads: they are shared out by heads, or by tokens; else by rows, as far as there are
            enough.
        of_whole: the width of what ranks that have whole experts exchange in their place: the
            outputs of one, which are made by one rank each.
    """

    width: int
    times: int = 1
    by_heads: bool = False
    of_whole: int = 0


# The values that are complete once all ranks have met at a barrier.
Meeting = tuple[Shared, ...]
