"""`GrammarMask`, a token mask that follows a grammar."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Protocol

from octavo.core.batch import CONSTRAINT_PROBLEM
from octavo.core.stats import ConstraintStats
from octavo.core.token_mask import Bits, MaskPart
from octavo.grammars.number_runs import NumberRuns

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MOST_FORCED = 256  # bytes that are written as tokens at once
_SPECIAL = b"\xff"  # begins a special token in a text of llguidance
_SECONDS = 1e-3  # that the first one of an answer may take

# Fewer masks than these are made sooner by one thread than others wake up.
_LEAST_TOGETHER = 4

# Of a processor, for one mask, or for one token that is followed: far more than any takes in a
# grammar that was tried, unless it was made to be slow where no trial comes to.
MAX_SECONDS = 0.05
_TOO_SLOW = f"a step of an answer takes more than {1e3 * MAX_SECONDS:g} ms of a processor"


class GrammarOrigin(Protocol):
    """The grammar of which masks are made."""

    def count_mask(self) -> None:
        """Count the bits of another place in an answer."""
        ...

    def renewed(self) -> LLMatcher | None:
        """Compile it again, if that is quick: masks share a lexer, whose states may be used up by
        others. None if it is not."""
        ...

    def give_up(self, why: str) -> None:
        """Make no further masks, which cost too much."""
        ...


class GrammarMask:
    """The tokens with which an answer can still become a sentence of a grammar.

    Stop tokens are allowed where the grammar can end. It may be told of tokens that it forbids, as
    drafts are: until these are rolled back, it forbids nothing. Where the grammar gets too complex
    to be followed, it allows no token, and has a ``problem``.

    Args:
        start: the beginning of the grammar. It is not changed, and masks may share it.
        stats: counts masks.
        numbers: at its beginning too; None leaves runs of digits as long as they are.
        encode: the tokens of a text, for forced ones; None forces none.
        executor: makes several masks at once; None makes one after the other.
        has_end: each text that must come has an end, so that it can be looked for.
        origin: the grammar, if masks of it may be renewed, and are counted.
    """

    is_over = False

    def __init__(
        self,
        start: LLMatcher,
        vocab_size: int,
        stats: ConstraintStats,
        numbers: NumberRuns | None = None,
        encode: Callable[[bytes], list[int]] | None = None,
        executor: LLExecutor | None = None,
        *,
        has_end: bool = True,
        origin: GrammarOrigin | None = None,
    ):
        self._start = start
        self._stats = stats
        self._matcher = start.deep_copy()
        self._num_words = -(-vocab_size // 32)
        self._numbers = numbers
        self._encode = encode
        self._executor = executor
        self._has_end = has_end
        self._origin = origin
        self._is_renewed = origin is None
        self._is_given_up = False
        self._failure = ""  # of a lexer that does not know any more what it knew before
        self._token_ids: list[int] = []
        self._num_wrong = 0  # the last tokens, of which the first was not allowed
        self._bits: Bits | None = None  # of the state as it is
        self._seconds = _SECONDS
        # Forced tokens, from a number of tokens on: a text is written as tokens once.
        self._forced: tuple[int, list[int]] = (0, [])

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def problem(self) -> str | None:
        error: str = self._failure or self._matcher.get_error()
        if self._is_given_up:
            error = _TOO_SLOW
        if error and not error.startswith("NoExtension"):
            reason = error.partition("\n")[0]
            return f"{CONSTRAINT_PROBLEM}the grammar is too complex for this answer: {reason}"
        if error or (self._bits is not None and not any(self._bits)):
            return (
                f"{CONSTRAINT_PROBLEM}what must come here cannot be written in the model's tokens"
            )
        return None

    def bitmask(self) -> Bits | None:
        if self._num_wrong:
            return None
        if self._bits is None:
            begun_at = perf_counter()
            bits = self._compute_bits()
            if self._is_exhausted and (start := self._renewed_start()) is not None:
                self._start, self._is_renewed = start, True
                self._catch_up(self._num_wrong)
                bits = self._compute_bits()
            self._bits = self._without_long_runs(bits)
            if self._origin is not None:
                self._origin.count_mask()
            self._seconds = perf_counter() - begun_at
            self._stats.num_masks += 1
            self._stats.mask_seconds += self._seconds
        return self._bits

    @property
    def seconds(self) -> float:
        # As long as the last one: slow ones come in runs, as in a string whose length is bounded.
        return self._seconds

    def parts(self) -> Sequence[MaskPart]:
        # What took too long with others is made alone the next time, so that it can be bounded.
        is_made = self._num_wrong or self._bits is not None
        return () if is_made or self._seconds > MAX_SECONDS else (self,)

    def make_together(self, parts: Sequence[MaskPart]) -> None:
        masks = [part for part in parts if isinstance(part, GrammarMask) and part.parts()]
        executor = self._executor
        if executor is None or len(masks) < _LEAST_TOGETHER:
            for mask in masks:
                mask.bitmask()
            return
        begun_at = perf_counter()
        masks = [mask for mask in masks if not mask._is_lost]
        count = self._num_words
        bits = array("I", bytes(4 * count * len(masks)))
        places = [(mask._matcher, index) for index, mask in enumerate(masks)]
        executor.unsafe_compute_mask_ptr(places, bits.buffer_info()[0], 4 * count, len(masks))
        for index, mask in enumerate(masks):
            if not mask._matcher.is_error():  # else `bitmask` makes what can be made of it
                mask._bits = mask._without_long_runs(bits[index * count : (index + 1) * count])
                if mask._origin is not None:
                    mask._origin.count_mask()
        seconds = perf_counter() - begun_at
        for mask in masks:
            mask._seconds = seconds if seconds > MAX_SECONDS else seconds / len(masks)
        self._stats.num_masks += len(masks)
        self._stats.mask_seconds += seconds

    @property
    def _is_exhausted(self) -> bool:
        """True if a limit was met with a lexer that others have used, too."""
        error: str = self._failure or self._matcher.get_error()
        is_limit = bool(error) and not error.startswith("NoExtension")
        return is_limit and not self._is_renewed and not self._is_given_up

    def _renewed_start(self) -> LLMatcher | None:
        return None if self._origin is None else self._origin.renewed()

    @property
    def _is_lost(self) -> bool:
        """True if it cannot say any more what may come."""
        return self._is_given_up or bool(self._failure) or bool(self._matcher.is_error())

    def _compute_bits(self) -> Bits:
        bits = array("I", bytes(4 * self._num_words))
        if not self._is_lost:
            address, count = bits.buffer_info()
            begun_at = thread_time()
            self._matcher.unsafe_compute_mask_ptr(address, 4 * count)
            self._bound(begun_at)
            if self._is_lost:
                return array("I", bytes(4 * self._num_words))
        return bits

    def _bound(self, begun_at: float) -> None:
        """Give up if work since a time of this thread was too much: others wait for it."""
        if thread_time() - begun_at > MAX_SECONDS:
            self._is_given_up = True
            if self._origin is not None:
                self._origin.give_up(_TOO_SLOW)

    def _catch_up(self, num_wrong: int) -> None:
        """Follow all tokens again, from the beginning; the last ones were wrong."""
        self._matcher, self._num_wrong = self._start.deep_copy(), num_wrong
        right = self._token_ids[: len(self._token_ids) - num_wrong]
        is_whole = self._matcher.try_consume_tokens(right) == len(right)
        self._failure = "" if is_whole else "its lexer has no states left"

    def _without_long_runs(self, bits: Bits) -> Bits:
        """Return the bits without those of digits that go on for too long, if any others are
        left."""
        if self._numbers is None or (others := self._numbers.bits()) is None:
            return bits
        kept = int.from_bytes(bits, "little") & int.from_bytes(others, "little")
        return array("I", kept.to_bytes(4 * len(bits), "little")) if kept else bits

    def advance(self, token_ids: Iterable[int]) -> None:
        token_ids = list(token_ids)
        if not token_ids:
            return
        bits, self._bits = self._bits, None
        if not self._is_lost:
            begun_at = thread_time()
            taken = 0 if self._num_wrong else self._matcher.try_consume_tokens(token_ids)
            self._bound(begun_at)
            was_right = not self._num_wrong and bits is not None and _has(bits, token_ids[0])
            if not taken and was_right and not self._matcher.is_error():
                self._failure = "its lexer has no states left"
            elif not self._matcher.is_error():
                self._num_wrong += len(token_ids) - taken
        self._token_ids += token_ids
        if self._numbers is not None:
            self._numbers.advance(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        self._bits = None
        del self._token_ids[len(self._token_ids) - num_tokens :]
        if len(self._token_ids) < self._forced[0]:
            self._forced = (0, [])
        if self._numbers is not None:
            self._numbers.rollback(num_tokens)
        if self._is_given_up:
            return
        if self._failure or self._matcher.is_error():  # it stays so
            self._catch_up(max(0, self._num_wrong - num_tokens))
            return
        wrong = min(num_tokens, self._num_wrong)
        self._num_wrong -= wrong
        if wrong < num_tokens:
            self._matcher.rollback(num_tokens - wrong)

    def fork(self) -> GrammarMask:
        other = GrammarMask.__new__(GrammarMask)
        other._start, other._stats = self._start, self._stats
        other._matcher = self._matcher.deep_copy()
        other._num_words = self._num_words
        other._numbers = None if self._numbers is None else self._numbers.fork()
        other._has_end = self._has_end
        other._origin, other._is_renewed = self._origin, self._is_renewed
        other._failure, other._is_given_up = self._failure, self._is_given_up
        other._token_ids = self._token_ids.copy()
        other._num_wrong, other._bits = self._num_wrong, self._bits
        other._executor, other._seconds = self._executor, self._seconds
        other._encode, other._forced = self._encode, self._forced
        return other

    @property
    def is_accepting(self) -> bool:
        """True if the tokens so far are a whole sentence of the grammar."""
        return not self._num_wrong and bool(self._matcher.is_accepting())

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if self._num_wrong:
            return len(token_ids)
        if self._is_lost:
            return 0
        count: int = self._matcher.validate_tokens(list(token_ids))
        return count

    def forced_tokens(self, most: int) -> list[int]:
        if self._num_wrong or self._is_lost or not self._has_end:
            return []
        begin, forced = self._forced
        done = len(self._token_ids) - begin
        if not (0 <= done < len(forced) and self._token_ids[begin:] == forced[:done]):
            begin, forced, done = len(self._token_ids), self._tokens_of_forced_text(), 0
            self._forced = (begin, forced)
        return forced[done : done + most]

    def _tokens_of_forced_text(self) -> list[int]:
        text = self._matcher.compute_ff_bytes()
        if not text or self._encode is None:
            return []
        if _SPECIAL in text:
            return list(self._matcher.compute_ff_tokens())
        # With the last token, which may be another where more text follows: drafts are verified.
        forced = self._encode(text[:_MOST_FORCED])
        return forced[: self.num_allowed(forced)]


def _has(bits: Bits, token_id: int) -> bool:
    return bool(bits[token_id >> 5] >> (token_id & 31) & 1)
