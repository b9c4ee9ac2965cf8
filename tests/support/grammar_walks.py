"""Masks of constraints over a vocabulary of bytes, and random answers under them."""

from __future__ import annotations

import random

from byte_tokens import EOS, VOCAB, byte_tokenizer

from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.compiler import GrammarCompiler

WORDS = (b"true", b'{"', b'":', b"12", b"ab", b'"}', b" ]", b"</think>", b"    ", b"00000000")
COMPILER = GrammarCompiler(byte_tokenizer(WORDS), VOCAB + len(WORDS) + 3, [EOS])


def mask(**asked):
    return COMPILER.mask(StructuredOutputs(**asked))


def allowed(mask) -> set[int]:
    bits = mask.bitmask()
    return {i for i in range(32 * len(bits)) if bits[i >> 5] >> (i & 31) & 1}


def walk(mask, rng: random.Random, limit: int = 300) -> bytes | None:
    """A random answer: what a model that knows nothing would write; None if it does not end."""
    text = b""
    for _ in range(limit):
        token = rng.choice(sorted(allowed(mask)))
        mask.advance([token])
        if token == EOS:
            return text
        text += COMPILER.vocabulary().texts[token]
    return None


def accepts(followed, text: str | list[int]) -> bool:
    """Whether a mask allows each token of a text, one byte each, and then the end."""
    tokens = (
        text if isinstance(text, list) else [*(text.encode() if isinstance(text, str) else text)]
    )
    for token in tokens:
        if token not in allowed(followed):
            return False
        followed.advance([token])
    return EOS in allowed(followed)
