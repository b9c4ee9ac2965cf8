"""`GrammarMask`, a token mask that follows a grammar."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.base.errors import InvalidRequestError
from octavo.core.token_mask import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMask:
    """The tokens with which an answer can still become a sentence of a grammar.

    Stop tokens are allowed where the grammar can end. It may be told of tokens that it forbids, as
    drafts are: until these are rolled back, it forbids nothing.

    Args:
        matcher: a state of the grammar, which is the mask's own.
    """

    is_over = False

    def __init__(self, matcher: LLMatcher, vocab_size: int):
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._num_followed = 0  # tokens that the matcher has taken
        self._num_wrong = 0  # those after them, of which the first was not allowed
        self._bits: Bits | None = None  # of the state as it is

    @property
    def num_tokens(self) -> int:
        return self._num_followed + self._num_wrong

    def bitmask(self) -> Bits | None:
        """Return the allowed tokens.

        Raises:
            InvalidRequestError: the grammar has become too complex at this place.
        """
        if self._num_wrong:
            return None
        if self._bits is None:
            bits = array("I", bytes(4 * self._num_words))
            address, count = bits.buffer_info()
            self._matcher.unsafe_compute_mask_ptr(address, 4 * count)
            if self._matcher.is_error():
                raise InvalidRequestError(
                    f"cannot be followed here: {self._matcher.get_error()}", "structured_outputs"
                )
            self._bits = bits
        return self._bits

    def advance(self, token_ids: Iterable[int]) -> None:
        token_ids = list(token_ids)
        if not token_ids:
            return
        self._bits = None
        taken = 0 if self._num_wrong else self._matcher.try_consume_tokens(token_ids)
        self._num_followed += taken
        self._num_wrong += len(token_ids) - taken

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        self._bits = None
        wrong = min(num_tokens, self._num_wrong)
        self._num_wrong -= wrong
        if followed := num_tokens - wrong:
            self._matcher.rollback(followed)
            self._num_followed -= followed

    def fork(self) -> GrammarMask:
        other = GrammarMask(self._matcher.deep_copy(), 32 * self._num_words)
        other._num_followed, other._num_wrong = self._num_followed, self._num_wrong
        other._bits = self._bits
        return other

    @property
    def is_accepting(self) -> bool:
        """True if the tokens so far are a whole sentence of the grammar."""
        return not self._num_wrong and bool(self._matcher.is_accepting())

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer would write their text; none if
        there is a choice."""
        return [] if self._num_wrong else list(self._matcher.compute_ff_tokens())
