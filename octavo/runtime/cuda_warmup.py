"""Steps of padding that compile all kernels before a request would wait for them.

Triton compiles a kernel when it is first launched with a combination of types, constants and
divisibility by 16. The combinations depend on the number of tokens and rows of a step, on the most
tokens of a sequence and on the sampling parameters, but not on the values. So a few steps of
padding cover them all; Triton caches compiled kernels on disk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.cuda.gemm_dispatch import FEW_CODED_ROWS
from octavo.kernels.cuda.sampling import MAX_TOP, Asked
from octavo.runtime.capacity import RankLimits
from octavo.runtime.cuda_inputs import aligned
from octavo.runtime.step_shapes import StepShape, power_of_two

# From so many tokens on, only the tiles of experts depend on the number: by powers of two.
_MANY_TOKENS = 2 * FEW_CODED_ROWS


def warm_up_shapes(limits: RankLimits, max_rows: int) -> Iterator[StepShape]:
    """Yield shapes of decode and prompt steps for each number of tokens at which kernels change:
    powers of two, and one less where it is small; and the largest step, in which libraries
    allocate their memory.

    Args:
        max_rows: the rows that get logits at once.
    """
    most = limits.max_num_batched_tokens
    powers = [1 << power for power in range(max(most, _MANY_TOKENS).bit_length())]
    before = [power - 1 for power in powers if 1 < power <= _MANY_TOKENS]
    for num_tokens in sorted({*powers, *before, most}):
        if num_tokens <= min(limits.max_num_seqs, most):
            yield StepShape.decode(num_tokens)
        if num_tokens <= most:
            num_seqs = min(2, limits.max_num_seqs)  # one of which may have few tokens
            yield StepShape(
                num_tokens, num_seqs, min(num_tokens, max_rows), power_of_two(num_tokens)
            )


def warm_up_sampling(
    num_rows: int, vocab_size: int
) -> Iterator[tuple[Asked, Tensor | None, Tensor, Tensor]]:
    """Yield all options of the sampler, without masks and with them, each with masks, edit starts
    and padding edits for ``num_rows`` rows as in ``SamplingTensors``."""
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    edits = torch.zeros(3, aligned(1), dtype=torch.int32)
    masks = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32)
    asked = Asked(cuts=True, edits=True, num_top=MAX_TOP, typical=True)
    yield asked, None, starts, edits
    yield asked._replace(masks=True), masks, starts, edits
