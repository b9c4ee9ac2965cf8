"""`completed`, which goes on with an answer that was cut until it is whole.

It is how to tell that a text is the beginning of something valid: there is an end to it that is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from octavo.core.token_mask import Bits, TokenMask

# Bytes that end a value, or begin a short one, in the order in which they are liked.
_ENDS = b'"}]0n1-{[:tf9,'
_MAX_TOKENS = 3000
_WORDS_SHARE = 0.3  # of the steps in which a word is tried


def completed(
    mask: TokenMask,
    text_of: Callable[[int], bytes],
    stop_token_ids: tuple[int, ...],
    words: Sequence[bytes] = (),
    seed: int = 0,
) -> bytes | None:
    """Return what may come next up to an end, as short as is found; None if no end is.

    Args:
        mask: is advanced. The first 256 tokens of its vocabulary are the bytes.
        text_of: the bytes of a token.
        words: texts that may lead to an end.
    """
    order = {byte: rank for rank, byte in enumerate(_ENDS)}
    rng = random.Random(seed)
    text = b""
    for _ in range(_MAX_TOKENS):
        bits = mask.bitmask()
        if bits is None or any(_has(bits, token_id) for token_id in stop_token_ids):
            return text
        word = rng.choice(words) if words and rng.random() < _WORDS_SHARE else b""
        if word and mask.num_allowed(list(word)) == len(word):
            mask.advance(list(word))
            text += word
            continue
        allowed = [token_id for token_id in _ids(bits) if len(text_of(token_id)) == 1]
        if not allowed:
            return None
        ranked = sorted(allowed, key=lambda each: order.get(text_of(each)[0], len(order)))
        # Now and then another one, where the one that is liked leads in a circle.
        token_id = ranked[0] if rng.random() < 0.8 else rng.choice(ranked)
        mask.advance([token_id])
        text += text_of(token_id)
    return None


def _has(bits: Bits, token_id: int) -> bool:
    return bool(bits[token_id >> 5] >> (token_id & 31) & 1)


def _ids(bits: Bits) -> list[int]:
    return [
        (index << 5) + bit
        for index, word in enumerate(bits)
        if word
        for bit in range(32)
        if word >> bit & 1
    ]
