"""Replaces placeholders by tokens that stayed on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 128  # tokens of a program


def resolve_placeholders(token_ids: Tensor, last_tokens: Tensor) -> None:
    """Compute ``DeviceSampler.resolve``."""
    num_tokens = len(token_ids)
    if num_tokens:
        grid = (triton.cdiv(num_tokens, _TOKENS),)
        _resolve[grid](token_ids, last_tokens, num_tokens, BLOCK=_TOKENS, num_warps=1)


@triton.jit(do_not_specialize=["num_tokens"])
def _resolve(token_ids, last_tokens, num_tokens, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + place, mask=place < num_tokens, other=0)
    is_open = token < 0
    last = tl.load(last_tokens - 1 - token, mask=is_open, other=0)
    tl.store(token_ids + place, last, mask=is_open)
