"""`GrammarCompiler`, which makes grammars of the constraints that requests ask for.

The grammars themselves are those of llguidance: an Earley parser over a lexer of regular
expressions' derivatives, walked together with a trie of the vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from copy import copy
from typing import TYPE_CHECKING, Protocol

from octavo.base.errors import ConstraintError
from octavo.core.stats import ConstraintStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.explanations import explained
from octavo.grammars.grammar_mask import GrammarMask
from octavo.grammars.number_runs import NumberRuns
from octavo.grammars.sources import GrammarSource, source_of
from octavo.grammars.vocabulary import GrammarVocabulary
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

_MAX_CACHED = 256  # grammars, and refusals

# Some limits are first met when a token has come: what is over them there is refused, too.
_NUM_FIRST_TOKENS = 2

# What takes longer to compile is not compiled again in the engine's thread.
_QUICK_SECONDS = 0.02


class Trial(Protocol):
    """Tries a constraint before it is compiled here."""

    def try_out(self, asked: StructuredOutputs, vocabulary: GrammarVocabulary) -> GrammarSource:
        """Return the grammar of what is asked for, which can be compiled within bounds.

        Raises:
            ConstraintError: it cannot.
        """
        ...


class GrammarCompiler:
    """Compiles the constraints of one model's requests. Any threads may share it.

    Equal constraints are compiled once, and refused once. The first one also waits for the
    vocabulary and its trie, about a second for 150,000 tokens.

    Args:
        vocab_size, stop_token_ids: see `GrammarVocabulary`.
        stats: counts what is compiled, and masks.

    ``trial`` may be set before the first constraint comes: then nothing is compiled that it has not
    tried.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_token_ids: Collection[int],
        stats: ConstraintStats | None = None,
    ):
        self._stats = stats or ConstraintStats()
        self.trial: Trial | None = None
        self._open: Callable[[], GrammarVocabulary] = lambda: GrammarVocabulary.of(
            tokenizer, vocab_size, stop_token_ids
        )
        self._vocabulary: GrammarVocabulary | None = None
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutputs, _Grammar | ConstraintError] = OrderedDict()

    def vocabulary(self) -> GrammarVocabulary:
        """Return the vocabulary, which is made at the first call."""
        with self._opening:
            if self._vocabulary is None:
                self._vocabulary = self._open()
                if self.trial is not None:  # which makes a trie of its own at the same time
                    threading.Thread(target=self._vocabulary.make_trie, daemon=True).start()
            return self._vocabulary

    def mask(self, asked: StructuredOutputs) -> GrammarMask:
        """Return a mask at the beginning of what is asked for.

        Raises:
            ConstraintError: it is no schema, expression or grammar, has a part that is not
                supported, cannot be satisfied, or is too complex; says where.
        """
        with self._lock:
            known = self._known.get(asked)
            if known is not None:
                self._known.move_to_end(asked)
        if known is None or (isinstance(known, _Grammar) and known.is_exhausted):
            vocabulary, begun_at = self.vocabulary(), time.perf_counter()
            known = self._compiled(asked, vocabulary) if known is None else known.again()
            with self._lock:
                self._stats.num_compiled += 1
                self._stats.compile_seconds += time.perf_counter() - begun_at
                self._known[asked] = known
                while len(self._known) > _MAX_CACHED:
                    self._known.popitem(last=False)
        if isinstance(known, ConstraintError):
            raise copy(known)  # one that was raised before has a traceback
        return known.mask(self._stats)

    def _compiled(
        self, asked: StructuredOutputs, vocabulary: GrammarVocabulary
    ) -> _Grammar | ConstraintError:
        try:
            if self.trial is not None:
                source = self.trial.try_out(asked, vocabulary)
            else:
                source = source_of(asked, vocabulary.special_ids, vocabulary.stop_token_ids)
            return _Grammar(source, asked, vocabulary)
        except ConstraintError as error:
            return error


class _Grammar:
    """A grammar at its beginning, of which masks are copies.

    They share the states of its lexer. When these are used up, it is exhausted, and those that meet
    that go on with a lexer of their own, if it is made quickly.
    """

    def __init__(
        self, source: GrammarSource, asked: StructuredOutputs, vocabulary: GrammarVocabulary
    ):
        begun_at = time.thread_time()
        self._start = compile_source(source, asked, vocabulary)
        self._seconds = time.thread_time() - begun_at
        self._source, self._asked, self._vocabulary = source, asked, vocabulary
        self.is_exhausted = False
        self._openings = [opening.encode() for opening in source.openings if opening]
        self._has_numbers = bool(source.openings)
        self._has_end = source.has_end

    def mask(self, stats: ConstraintStats) -> GrammarMask:
        vocabulary = self._vocabulary
        numbers = NumberRuns(vocabulary.digits, self._openings) if self._has_numbers else None
        encode = vocabulary.tokens.tokenize_bytes
        sizes = vocabulary.vocab_size, stats, numbers, encode, vocabulary.executor
        return GrammarMask(self._start, *sizes, has_end=self._has_end, renew=self._renewed)

    def again(self) -> _Grammar:
        """Return the grammar with a new lexer."""
        return _Grammar(self._source, self._asked, self._vocabulary)

    def _renewed(self) -> LLMatcher | None:
        self.is_exhausted = True
        if self._seconds > _QUICK_SECONDS:
            return None
        return compile_source(self._source, self._asked, self._vocabulary)


def compile_source(
    source: GrammarSource, asked: StructuredOutputs, vocabulary: GrammarVocabulary
) -> LLMatcher:
    """Return a grammar at its beginning.

    Args:
        asked: what the source was made of, for messages.

    Raises:
        ConstraintError: it is no grammar, is too complex, or cannot be satisfied.
    """
    from llguidance import LLMatcher

    if not vocabulary.stop_token_ids:
        message = "the model has no token that ends an answer"
        raise ConstraintError(message, "structured_outputs", "unwritable")
    limits = parser_limits(has_rules=source.has_rules)
    start = LLMatcher(vocabulary.tokens, source.text, log_level=0, limits=limits)
    if start.is_error():
        raise explained(start.get_error(), source, asked)
    followed = start.deep_copy()
    for _ in range(_NUM_FIRST_TOKENS):
        bits = followed.compute_bitmask()
        if followed.is_error() or not any(bits):
            raise explained(followed.get_error(), source, asked)
        common = int.from_bytes(bits, "little")
        token_id = (common & -common).bit_length() - 1  # the first that is allowed
        if token_id in vocabulary.stop_token_ids:
            break
        if not followed.consume_token(token_id):
            raise explained(followed.get_error(), source, asked)
    return start


def parser_limits(*, has_rules: bool) -> LLParserLimits:
    """Return bounds on the time and the memory of one grammar.

    Those of a schema have rows of four items for each optional property, of which few are alive.
    Where a user wrote the rules, all may be, and time grows with their square.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # some 20 ms
        step_lexer_fuel=50_000,  # some 3 ms
        step_max_items=5_000 if has_rules else 20_000,
        max_items_in_row=500 if has_rules else 2_000,
        max_lexer_states=20_000,  # 1 to 2 kB each
        max_grammar_size=200_000,
        verbose_errors=False,
    )
