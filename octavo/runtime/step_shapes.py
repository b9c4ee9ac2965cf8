"""Shapes of steps on a GPU, and those that are captured as CUDA graphs.

Without PyTorch, since plans count them too.

A smaller step is padded to a captured shape. There are two kinds::

    decode   one token of each request             1  2  4  8  16  32  48 ... 256 requests
    prompt   chunks of prompts, drafts, and        16  32  48  64  96  128  192  256 ... tokens
             decodes beside them                   of at most 8, 32, or all requests

Sizes are close together, so that little is computed for padding. Steps whose products take a GPU
longer than launching them are not captured: they would gain nothing, and compute padding.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DECODES = 256
_DECODE_STEP = 16
LEAST_TOKENS, MOST_TOKENS = 16, 2048  # of a captured prompt step
_PROMPT_SEQS = (8, 32)
# Operations of a step that take a large GPU about as long as launching its kernels takes the host:
# 10 ms at 500 * 10^12 a second.
_LAUNCH_OPS = 5e12


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step, padding included."""

    num_tokens: int
    num_seqs: int
    num_rows: int  # rows that are sampled
    max_query: int  # the most tokens of a sequence

    @classmethod
    def decode(cls, num_seqs: int) -> StepShape:
        """Return the shape of a decode step: a token and a row for each sequence."""
        return cls(num_seqs, num_seqs, num_seqs, 1)

    @property
    def is_decode(self) -> bool:
        return self == StepShape.decode(self.num_seqs)


def decode_shapes(max_num_seqs: int) -> list[StepShape]:
    """Return the decode steps to capture, ascending up to ``max_num_seqs``, at most 256."""
    most = min(max_num_seqs, MAX_DECODES)
    few = (1, 2, 4, 8, *range(_DECODE_STEP, most, _DECODE_STEP))
    return [StepShape.decode(size) for size in sorted({most, *(n for n in few if n < most)})]


def prompt_shapes(
    max_num_seqs: int, max_num_batched_tokens: int, ops_per_token: float
) -> list[StepShape]:
    """Return the prompt steps to capture, ascending by tokens and then by sequences.

    Args:
        ops_per_token: operations of the products with weights, for each token.
    """
    most = min(max_num_batched_tokens, MOST_TOKENS)
    powers = [1 << power for power in range(most.bit_length())]
    between = [3 * power for power in powers if power >= LEAST_TOKENS]  # 48, 96 ...
    return [
        StepShape(tokens, seqs, 1, power_of_two(tokens))
        for tokens in sorted({most, *powers, *between})
        if LEAST_TOKENS <= tokens <= most and tokens * ops_per_token <= _LAUNCH_OPS
        for seqs in _seqs_of(tokens, max_num_seqs)
    ]


def _seqs_of(num_tokens: int, max_num_seqs: int) -> list[int]:
    """Return numbers of sequences up to those that so many tokens can have."""
    most = min(num_tokens, max_num_seqs)
    return [*(seqs for seqs in _PROMPT_SEQS if seqs < most), most]


def power_of_two(count: int) -> int:
    """Return the least power of two that is not less than a count."""
    return 1 << (count - 1).bit_length()
