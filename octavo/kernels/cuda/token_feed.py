"""Tokens that stay on the GPU: placeholders become them, and drafted ones are held against them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cuda.sampling import Chains

_TOKENS = 128  # that a program looks at; a chain is no longer


def resolve_placeholders(token_ids: Tensor, last_tokens: Tensor) -> None:
    """As ``DeviceSampler.resolve``."""
    num_tokens = len(token_ids)
    if num_tokens:
        grid = (triton.cdiv(num_tokens, _TOKENS),)
        _resolve[grid](token_ids, last_tokens, num_tokens, BLOCK=_TOKENS, num_warps=1)


def accept_chains(token_ids: Tensor, unsound: Tensor, chains: Chains, last_tokens: Tensor) -> None:
    """As ``DeviceSampler.accept``, of chains with at most 128 rows."""
    if len(chains.counts):
        _accept[(len(chains.counts),)](
            token_ids,
            unsound,
            chains.drafted,
            chains.starts,
            chains.counts,
            chains.seats,
            last_tokens,
            BLOCK=_TOKENS,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _resolve(token_ids, last_tokens, num_tokens, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + place, mask=place < num_tokens, other=0)
    is_open = token < 0
    last = tl.load(last_tokens - 1 - token, mask=is_open, other=0)
    tl.store(token_ids + place, last, mask=is_open)


@triton.jit
def _accept(token_ids, unsound, drafted, starts, counts, seats, last_tokens, BLOCK: tl.constexpr):
    chain = tl.program_id(0)
    begin, end = tl.load(starts + chain), tl.load(starts + chain + 1)
    place = tl.arange(0, BLOCK)
    exists = begin + place < end
    is_sound = tl.load(unsound + begin + place, mask=exists, other=1) == 0
    token = tl.load(token_ids + begin + place, mask=exists, other=0)
    goes_on = is_sound & (token == tl.load(drafted + begin + place, mask=exists, other=-1))
    # The first row that does not go on is the last whose token counts, if that is sound.
    stop = tl.min(tl.where(goes_on, BLOCK, place), 0)
    count = stop + tl.sum(((place == stop) & is_sound).to(tl.int32), 0)
    tl.store(counts + chain, count)
    last = tl.sum(tl.where(place == count - 1, token, 0), 0)
    seat = tl.load(seats + chain)
    tl.store(last_tokens + seat, last, mask=(seat >= 0) & (count > 0))
