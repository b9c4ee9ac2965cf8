"""`TimedMask`, a mask whose bits are timed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from octavo.core.token_mask import Bits, MaskPart, TokenMask


class TimedMask:
    """A mask around another one.

    Args:
        seconds: gets the time of each ``bitmask`` that follows a token.
    """

    def __init__(self, mask: TokenMask, seconds: list[float]):
        self._mask, self._seconds = mask, seconds

    @property
    def num_tokens(self) -> int:
        return self._mask.num_tokens

    @property
    def is_over(self) -> bool:
        return self._mask.is_over

    @property
    def problem(self) -> str | None:
        return self._mask.problem

    @property
    def seconds(self) -> float:
        return self._mask.seconds

    def parts(self) -> Sequence[MaskPart]:
        return ()  # made together, none has a time of its own

    def bitmask(self) -> Bits | None:
        begin = time.perf_counter()
        bits = self._mask.bitmask()
        self._seconds.append(time.perf_counter() - begin)
        return bits

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return self._mask.num_allowed(token_ids)

    def forced_tokens(self, most: int) -> Sequence[int]:
        return self._mask.forced_tokens(most)

    def advance(self, token_ids: Iterable[int]) -> None:
        self._mask.advance(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._mask.rollback(num_tokens)

    def fork(self) -> TimedMask:
        return TimedMask(self._mask.fork(), self._seconds)
