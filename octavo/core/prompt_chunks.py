"""Size of the chunks in which prompts are soonest through the stages of a pipeline.

The slowest stage computes all chunks one after the other, and the last chunk then goes on through
the others. So n tokens, in equal chunks of c, are through d stages that each take t(c) after

    T(c) = (n / c + d - 1) t(c)

Large chunks leave stages idle until the first one has come, and after the last one has gone (the
bubble of GPipe, Huang et al. 2019). Small ones pay more often for what a step costs whatever is in
it: weights that are read, kernels that are launched. Where that is worth ``a`` tokens, t(c) is in
proportion to a + c, and T is least at c = sqrt(n a / (d - 1)). Times of real stages have other
shapes, with experts above all, so that the least of T is looked for among some sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

StageSeconds = Callable[[int], float]
"""Returns the time of a chunk of so many prompt tokens in the slowest stage, in any unit."""

# Of a step, in prompt tokens, where times are not known. By the model of step times, 28 on an EPYC
# without matrix units and 128 on a Xeon with them, for a model of 8 billion weights; 120 to 180 on
# an H100. Half or twice as many make T 1 to 6 % longer.
STEP_TOKENS = 64

_LEAST = 16


def with_step_of(tokens: float) -> StageSeconds:
    """Return times of a step that costs as much as so many tokens, and of its tokens."""
    return lambda num_tokens: tokens + num_tokens


class ChunkSeconds:
    """Times of chunks, on lines between those of some sizes, which are asked for at once, and known
    to six digits, so that they are short in documents.

    Args:
        most: tokens of a chunk.
    """

    def __init__(self, most: int, seconds: StageSeconds):
        self.sizes = list(_sizes(most))
        self._seconds = [float(f"{seconds(size):.6g}") for size in self.sizes]

    def __call__(self, num_tokens: float) -> float:
        """Below the least size, a chunk takes as long as that; beyond the largest, lines go on."""
        after = min(bisect_left(self.sizes, num_tokens), len(self.sizes) - 1)
        if after == 0:
            return self._seconds[0]
        start, end = self.sizes[after - 1 : after + 1]
        first, last = self._seconds[after - 1 : after + 1]
        return first + (last - first) * (num_tokens - start) / (end - start)

    def as_json(self) -> dict[str, Any]:
        """Return sizes and times."""
        return {"sizes": self.sizes, "seconds": self._seconds}

    def scaled(self, factor: float) -> ChunkSeconds:
        """Return times that are so many times as long."""
        known = dict(zip(self.sizes, self._seconds, strict=True))
        return ChunkSeconds(self.sizes[-1], lambda size: factor * known[size])


class PromptChunks:
    """The sizes of chunks for a pipeline.

    Args:
        depth: its stages.
        most: tokens of a chunk.
        seconds: by default, of a step of ``STEP_TOKENS``.
    """

    def __init__(self, depth: int, most: int, seconds: StageSeconds | None = None):
        self._later = depth - 1
        self.seconds = ChunkSeconds(most, seconds or with_step_of(STEP_TOKENS))

    def size(self, total: int) -> int:
        """Return the tokens of each of equal chunks of ``total`` tokens; the last has what is
        left."""
        counts = {max(1, -(-total // size)) for size in self.seconds.sizes}
        count = min(sorted(counts), key=lambda count: self._through(total, count))
        return max(1, -(-total // count))

    def _through(self, total: int, count: int) -> float:
        """Time until so many equal chunks are through all stages."""
        return (count + self._later) * self.seconds(-(-total // count))


def _sizes(most: int) -> Iterator[int]:
    """Yield sizes of chunks up to the largest, each larger by a half or a third."""
    size = _LEAST
    while size < most:
        yield size
        if size + size // 2 < most:
            yield size + size // 2
        size *= 2
    yield most
