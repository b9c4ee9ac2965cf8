"""Masks of the tokens that a request may generate next.

Everything that forbids tokens is a ``TokenMask``: a list of allowed ids, forbidden words, stop
tokens that would come too early, a grammar. A sampler asks for the bits of one position and knows
of no other difference.

Bits are packed into 32-bit words, the lowest first, as native samplers and grammar libraries want
them: token t is allowed if bit t % 32 of word t // 32 is set.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from functools import lru_cache
from itertools import takewhile
from operator import is_
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from octavo.core.sampling_params import SamplingParams

Bits: TypeAlias = "array[int]"  # of 32-bit words, type code "I"
assert array("I").itemsize == 4


class MaskPart(Protocol):
    """A mask, or one of several that are a request's, that can be made together with others."""

    def make_together(self, parts: Sequence[MaskPart]) -> None:
        """Make the bits of several masks, of which this is one, by all cores: ``bitmask`` is a
        look-up then, if no error came up."""
        ...


class TokenMask(Protocol):
    """A mask of one request. It follows the request's tokens, and knows how many it has
    followed."""

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens that it has followed."""
        ...

    @property
    def is_over(self) -> bool:
        """True if nothing is forbidden from here on, whatever tokens come."""
        ...

    @property
    def problem(self) -> str | None:
        """Why it allows no token at all, where that is not what it is for; None otherwise."""
        ...

    @property
    def seconds(self) -> float:
        """Time that ``bitmask`` is likely to take; 0 for a look-up."""
        ...

    def parts(self) -> Sequence[MaskPart]:
        """Return those of its masks that take time, to be made beforehand with those of others."""
        ...

    def bitmask(self) -> Bits | None:
        """Return the allowed next tokens; None if all are. The array is never changed: after
        another token there is another object."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other. Quick, so that it
        may count a token that ``bitmask`` forbids."""
        ...

    def forced_tokens(self, most: int) -> Sequence[int]:
        """Return up to ``most`` tokens whose text must come next, as the tokenizer writes it; none
        if there is a choice. Other tokens may write the same text, and are allowed too."""
        ...

    def advance(self, token_ids: Iterable[int]) -> None:
        """Follow further tokens. They need not have been allowed: drafts may be wrong."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens that it has followed."""
        ...

    def fork(self) -> TokenMask:
        """Return a copy in the same state."""
        ...


def create_mask(
    params: SamplingParams,
    vocab_size: int,
    stop_token_ids: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    grammar: TokenMask | None = None,
    thought: TokenMask | None = None,
) -> TokenMask | None:
    """Return the mask of ``params``; None if they forbid nothing.

    Args:
        stop_token_ids: tokens that must not come before ``params.min_tokens``.
        bad_words: ``params.bad_words`` as tokens, maybe several variants of a word.
        grammar: the mask of ``params.structured_outputs``, at its beginning. Where it is at its
            end, so is the answer, even if it should be longer.
        thought: the mask of ``params.thinking_token_budget``; it yields to the others.
    """
    masks: list[TokenMask] = [] if grammar is None else [grammar]
    if params.allowed_token_ids is not None:
        masks.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    if any(bad_words):
        masks.append(BadWords(bad_words, vocab_size))
    lengths: list[TokenMask] = []
    if params.min_tokens > 0 and stop_token_ids:
        lengths.append(MinTokens(params.min_tokens, stop_token_ids, vocab_size))
    if grammar is None:
        masks, lengths = masks + lengths, []
    elif params.ignore_eos:  # the answer goes on as long as the grammar lets it
        ends_of_text = set(stop_token_ids).difference(params.stop_token_ids)
        lengths.append(MinTokens(math.inf, ends_of_text, vocab_size))
    if thought is not None:
        lengths.append(thought)
    if len(masks) + len(lengths) <= 1:
        return next(iter(masks + lengths), None)
    return AllOf(masks, lengths)


class _Counting:
    """A mask that depends on the number of tokens only."""

    seconds = 0.0
    problem = None

    def __init__(self) -> None:
        self.num_tokens = 0

    def parts(self) -> Sequence[MaskPart]:
        return ()

    def advance(self, token_ids: Iterable[int]) -> None:
        self.num_tokens += sum(1 for _ in token_ids)

    def rollback(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens

    def fork(self) -> Self:
        return copy(self)

    def forced_tokens(self, most: int) -> Sequence[int]:
        return ()


class AllowedTokens(_Counting):
    """Allows these tokens and no others, always."""

    is_over = False

    def __init__(self, token_ids: Iterable[int], vocab_size: int):
        super().__init__()
        self._bits = array("I", bytes(4 * -(-vocab_size // 32)))
        for token_id in token_ids:
            if 0 <= token_id < vocab_size:
                self._bits[token_id >> 5] |= 1 << (token_id & 31)

    def bitmask(self) -> Bits:
        return self._bits

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return _num_leading(_is_in(self._bits, token_id) for token_id in token_ids)


class MinTokens(_Counting):
    """Forbids stop tokens among the first ``min_tokens``."""

    def __init__(self, min_tokens: float, stop_token_ids: Iterable[int], vocab_size: int):
        super().__init__()
        self._min_tokens = min_tokens
        self._bits = _without(_everything(vocab_size), stop_token_ids, vocab_size)

    @property
    def is_over(self) -> bool:
        return self.num_tokens >= self._min_tokens

    def bitmask(self) -> Bits | None:
        return None if self.is_over else self._bits

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return _num_leading(
            count >= self._min_tokens or _is_in(self._bits, token_id)
            for count, token_id in enumerate(token_ids, self.num_tokens)
        )


class _Beginning:
    """A node of a trie: tokens with which words begin, and those that would complete one."""

    __slots__ = ("last", "longer")

    def __init__(self) -> None:
        self.longer: dict[int, _Beginning] = {}
        self.last: list[int] = []


class BadWords:
    """Forbids sequences of tokens: no token may complete one.

    All words are followed at once, in a trie. A token costs a look-up for each word that is under
    way, and there are no more of these than the longest word has tokens.
    """

    is_over = False
    seconds = 0.0
    problem = None

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int):
        self._vocab_size = vocab_size
        self._root = _Beginning()
        self._longest = 1
        for word in filter(None, words):
            node = self._root
            for token_id in word[:-1]:
                node = node.longer.setdefault(token_id, _Beginning())
            node.last.append(word[-1])
            self._longest = max(self._longest, len(word))
        self._always = _without(_everything(vocab_size), self._root.last, vocab_size)
        self._token_ids: list[int] = []
        self._under_way: list[_Beginning] = []

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def bitmask(self) -> Bits | None:
        last = [token_id for node in self._under_way for token_id in node.last]
        if last:
            return _without(self._always, last, self._vocab_size)
        return self._always if self._root.last else None

    def parts(self) -> Sequence[MaskPart]:
        return ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        under_way = self._under_way
        count = 0
        for token_id in token_ids:
            if any(token_id in node.last for node in (self._root, *self._under_way)):
                break
            count += 1
            self._follow(token_id)
        self._under_way = under_way
        return count

    def forced_tokens(self, most: int) -> Sequence[int]:
        return ()

    def advance(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._follow(token_id)

    def rollback(self, num_tokens: int) -> None:
        kept = len(self._token_ids) - num_tokens
        del self._token_ids[kept:]
        self._under_way = []
        for token_id in self._token_ids[max(0, kept - self._longest + 1) :]:
            self._follow(token_id)

    def _follow(self, token_id: int) -> None:
        self._under_way = [
            longer
            for node in (self._root, *self._under_way)
            if (longer := node.longer.get(token_id)) is not None
        ]

    def fork(self) -> BadWords:
        other = copy(self)
        other._token_ids = self._token_ids.copy()
        return other


class AllOf:
    """Allows what all of several masks allow.

    Args:
        yielding: further masks, each of which counts only where it leaves a token.
    """

    def __init__(self, masks: Sequence[TokenMask], yielding: Sequence[TokenMask] = ()):
        self._num_firm = len(masks)
        self._masks = (*masks, *yielding)
        # Masks mostly say what they said at the token before, with the very same object.
        self._last: tuple[list[Bits | None], Bits] | None = None

    @property
    def num_tokens(self) -> int:
        return self._masks[0].num_tokens

    @property
    def is_over(self) -> bool:
        return all(mask.is_over for mask in self._masks)

    @property
    def problem(self) -> str | None:
        return next((mask.problem for mask in self._masks if mask.problem is not None), None)

    def bitmask(self) -> Bits | None:
        found = [mask.bitmask() for mask in self._masks]
        known = [bits for bits in found if bits is not None]
        if len(known) <= 1:
            return known[0] if known else None
        if self._last is not None:
            before, result = self._last
            if all(map(is_, before, found)):
                return result
        common = -1
        for bits in filter(None, found[: self._num_firm]):
            common &= int.from_bytes(bits, "little")  # a long number: as fast as Python gets
        for bits in filter(None, found[self._num_firm :]):
            common = common & int.from_bytes(bits, "little") or common
        result = array("I", common.to_bytes(4 * len(known[0]), "little"))
        self._last = (found, result)
        return result

    @property
    def seconds(self) -> float:
        return sum(mask.seconds for mask in self._masks)

    def parts(self) -> Sequence[MaskPart]:
        return [part for mask in self._masks for part in mask.parts()]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return min(mask.num_allowed(token_ids) for mask in self._masks[: self._num_firm])

    def forced_tokens(self, most: int) -> Sequence[int]:
        forced = max((mask.forced_tokens(most) for mask in self._masks), key=len)
        return forced[: self.num_allowed(forced)]

    def advance(self, token_ids: Iterable[int]) -> None:
        token_ids = list(token_ids)
        for mask in self._masks:
            mask.advance(token_ids)

    def rollback(self, num_tokens: int) -> None:
        for mask in self._masks:
            mask.rollback(num_tokens)

    def fork(self) -> AllOf:
        masks = [mask.fork() for mask in self._masks]
        return AllOf(masks[: self._num_firm], masks[self._num_firm :])


@lru_cache(maxsize=8)
def _everything(vocab_size: int) -> Bits:
    """Return all bits, those beyond the vocabulary too. Not to be changed."""
    return array("I", b"\xff" * (4 * -(-vocab_size // 32)))


def _is_in(bits: Bits, token_id: int) -> bool:
    return 0 <= token_id < 32 * len(bits) and bool(bits[token_id >> 5] >> (token_id & 31) & 1)


def _num_leading(are_allowed: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, are_allowed))


def _without(bits: Bits, token_ids: Iterable[int], vocab_size: int) -> Bits:
    bits = bits[:]
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            bits[token_id >> 5] &= ~(1 << (token_id & 31))
    return bits
