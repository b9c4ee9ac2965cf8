"""`SampledMasks`, what masks of a grammar cost at places to which its answers may come."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from octavo.grammars.vocabulary import GrammarVocabulary

T = TypeVar("T")

# Of a processor. A usual mask takes 50 µs, one of a thousand 1 ms; in a hostile grammar 180 ms.
MAX_MASK_SECONDS = 0.01

_NUM_WALKS = 4
_NUM_TOKENS = 24  # of each
_SECONDS = 0.025  # after which no further walk begins


class SampledMasks:
    """The masks of random answers to a grammar, the same for equal grammars.

    Attributes:
        num_masks: number of masks that were made.
        most_seconds: of a processor, that the slowest took, or what it takes to follow a token.
    """

    def __init__(self, start: LLMatcher, vocabulary: GrammarVocabulary):
        self.num_masks = 0
        self.most_seconds = 0.0
        self._stop_bits = sum(1 << token_id for token_id in vocabulary.stop_token_ids)
        begun_at = time.thread_time()
        for seed in range(_NUM_WALKS):
            self._follow(start.deep_copy(), random.Random(seed))
            if time.thread_time() - begun_at > _SECONDS:
                break

    @property
    def are_slow(self) -> bool:
        """True if one took longer than any may."""
        return self.most_seconds > MAX_MASK_SECONDS

    def _follow(self, matcher: LLMatcher, rng: random.Random) -> None:
        """Follow one answer, up to its end or to where it cannot be followed."""
        for _ in range(_NUM_TOKENS):
            bits = self._timed(matcher, _bits_of)
            self.num_masks += 1
            allowed = int.from_bytes(bits, "little") & ~self._stop_bits
            if self.are_slow or matcher.is_error() or not allowed:
                return
            token_id = _any_of(allowed, rng)
            self._timed(matcher, partial(_consume, token_id))
            if self.are_slow or matcher.is_error():
                return

    def _timed(self, matcher: LLMatcher, work: Callable[[LLMatcher], T]) -> T:
        """Return the result of some work. If it was slow, it is done again: the machine may have
        been so."""
        copied = matcher.deep_copy()
        begun_at = time.thread_time()
        result = work(matcher)
        seconds = time.thread_time() - begun_at
        if seconds > MAX_MASK_SECONDS:
            begun_at = time.thread_time()
            work(copied)
            seconds = min(seconds, time.thread_time() - begun_at)
        self.most_seconds = max(self.most_seconds, seconds)
        return result


def _bits_of(matcher: LLMatcher) -> bytes:
    return matcher.compute_bitmask()


def _consume(token_id: int, matcher: LLMatcher) -> bool:
    return matcher.consume_token(token_id)


def _any_of(allowed: int, rng: random.Random) -> int:
    """Return one of the tokens whose bits are set."""
    shift = rng.randrange(allowed.bit_length())
    bits = allowed >> shift  # the highest bit is left at least
    return shift + (bits & -bits).bit_length() - 1
