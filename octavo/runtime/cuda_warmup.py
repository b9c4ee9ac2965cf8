"""Steps of nobody, by which kernels are compiled before a request would wait for it.

Triton compiles a kernel when it is first launched with arguments of a kind: of some types and
constants, some of them multiples of 16. Which kinds there are depends on how many tokens and rows a
step has, on the most tokens of a sequence, and on what rows ask of the sampler, and never on what
is in a step. So steps of nobody, of a few shapes, have them all; what was compiled on a machine
once, Triton finds on its disk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.cuda.attention_plan import power_of_two
from octavo.kernels.cuda.gemm_dispatch import FEW_CODED_ROWS
from octavo.kernels.cuda.sampling import MAX_TOP, Asked
from octavo.runtime.capacity import RankLimits
from octavo.runtime.cuda_inputs import StepShape, aligned

# From so many tokens on, only tiles of experts still change: with powers of two.
_MANY_TOKENS = 2 * FEW_CODED_ROWS


def warm_up_shapes(limits: RankLimits, max_rows: int) -> Iterator[StepShape]:
    """Steps of single tokens, and of prompts, of each number of tokens at which kernels change:
    powers of two, and one less if it is few; and the largest, by which libraries take what memory
    they need.

    Args:
        max_rows: of which logits are made at once.
    """
    most = limits.max_num_batched_tokens
    powers = [1 << power for power in range(max(most, _MANY_TOKENS).bit_length())]
    before = [power - 1 for power in powers if 1 < power <= _MANY_TOKENS]
    for num_tokens in sorted({*powers, *before, most}):
        if num_tokens <= min(limits.max_num_seqs, most):
            yield StepShape.decode(num_tokens)
        if num_tokens <= most:
            num_seqs = min(2, limits.max_num_seqs)  # of which one is of few tokens, maybe
            yield StepShape(
                num_tokens, num_seqs, min(num_tokens, max_rows), power_of_two(num_tokens)
            )


def warm_up_sampling(
    num_rows: int, vocab_size: int
) -> Iterator[tuple[Asked, Tensor | None, Tensor, Tensor]]:
    """All that rows may ask of a sampler, without masks and with them: with the masks, and with
    edits of nobody, of as many rows, as in ``SamplingTensors``."""
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    edits = torch.zeros(3, aligned(1), dtype=torch.int32)
    masks = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32)
    asked = Asked(cuts=True, edits=True, num_top=MAX_TOP, typical=True)
    yield asked, None, starts, edits
    yield asked._replace(masks=True), masks, starts, edits
