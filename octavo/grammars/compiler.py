"""`GrammarCompiler`, which makes grammars of the constraints that requests ask for.

The grammars themselves are those of llguidance: an Earley parser over a lexer of regular
expressions' derivatives, walked together with a trie of the vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from octavo.base.errors import ConstraintError, QueueFullError
from octavo.core.stats import ConstraintStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.explanations import explained
from octavo.grammars.grammar_mask import GrammarMask
from octavo.grammars.known_grammars import KnownGrammars
from octavo.grammars.number_runs import NumberRuns
from octavo.grammars.small import is_small
from octavo.grammars.sources import GrammarSource, source_of
from octavo.grammars.tried_grammar import TriedGrammar
from octavo.grammars.vocabulary import GrammarVocabulary
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

# Some limits are first met when a token has come: what is over them there is refused, too.
_NUM_FIRST_TOKENS = 2

# To have a constraint tried, where other programs have the processors.
_MAX_ATTEMPTS = 5

# What takes longer to compile is not compiled again in the engine's thread.
_QUICK_SECONDS = 0.02


class Trial(Protocol):
    """Tries constraints before they are compiled here."""

    def ask(
        self, asked: StructuredOutputs, vocabulary: GrammarVocabulary, tenant: str = ""
    ) -> Future[TriedGrammar]:
        """Have a constraint tried. The result is its grammar, which can be compiled within bounds;
        or a ConstraintError, or another one if that cannot be told now.

        Raises:
            QueueFullError: too many wait already.
        """
        ...

    def close(self) -> None:
        """End what tries them."""
        ...


class GrammarCompiler:
    """Compiles the constraints of one model's requests. Any threads may share it.

    Equal constraints are tried and compiled once, and refused once. The first one also waits for
    the vocabulary and its trie, about a second for 150,000 tokens.

    Args:
        vocab_size, stop_token_ids: see `GrammarVocabulary`.
        stats: counts what is compiled, and masks.
        trial: tries constraints that are not small before anything else is done with them; None
            compiles all as they come.

    ``tries_small`` may be set before the first constraint comes: then all are tried, since those
    who ask may want to do harm.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_token_ids: Collection[int],
        stats: ConstraintStats | None = None,
        trial: Trial | None = None,
    ):
        self._stats = stats or ConstraintStats()
        self._trial = trial
        self.tries_small = False
        self._open: Callable[[], GrammarVocabulary] = lambda: GrammarVocabulary.of(
            tokenizer, vocab_size, stop_token_ids
        )
        self._vocabulary: GrammarVocabulary | None = None
        self._opening = threading.Lock()
        self._lock = threading.Lock()  # of counts, and of those that are being tried
        self._on_trial: dict[StructuredOutputs, Future[TriedGrammar]] = {}
        self._known: KnownGrammars[_Known] = KnownGrammars()

    def vocabulary(self) -> GrammarVocabulary:
        """Return the vocabulary, which is made at the first call."""
        with self._opening:
            if self._vocabulary is None:
                self._vocabulary = self._open()
                if self._trial is not None:  # which makes a trie of its own at the same time
                    threading.Thread(target=self._vocabulary.make_trie, daemon=True).start()
            return self._vocabulary

    def close(self) -> None:
        """End the trial. May be repeated."""
        if self._trial is not None:
            self._trial.close()

    def is_compiled(self, asked: StructuredOutputs) -> bool:
        """Return whether ``mask`` answers at once."""
        known = self._known.get(asked)
        return isinstance(known, _Refused) or (isinstance(known, _Grammar) and not known.is_stale)

    def seconds_to_compile(self, asked: StructuredOutputs) -> float:
        """Return what compiling takes of a processor, where that is known."""
        known = self._known.get(asked)
        return known.grammar.seconds if isinstance(known, _Tried | _Grammar) else 0.0

    def try_out(self, asked: StructuredOutputs, tenant: str = "") -> Future[TriedGrammar] | None:
        """Have a constraint tried, for which ``mask`` would wait; None if that is not needed.

        Raises:
            QueueFullError: too many wait already.
        """
        if not self._is_to_be_tried(asked) or self._known.get(asked) is not None:
            return None
        assert self._trial is not None
        vocabulary, begun_at = self.vocabulary(), time.perf_counter()
        with self._lock:
            if (found := self._on_trial.get(asked)) is not None:
                return found
            found = self._on_trial[asked] = self._trial.ask(asked, vocabulary, tenant)
        # Outside of the lock, for it may have ended. It is known before others hear of that.
        found.add_done_callback(lambda result: self._end_trial(asked, result, begun_at))
        return found

    def _is_to_be_tried(self, asked: StructuredOutputs) -> bool:
        return self._trial is not None and (self.tries_small or not is_small(asked))

    def _end_trial(
        self, asked: StructuredOutputs, result: Future[TriedGrammar], begun_at: float
    ) -> None:
        error = result.exception()
        if error is None:
            self._known.put(asked, _Tried(result.result()))
        elif isinstance(error, ConstraintError):
            self._known.put(asked, _Refused(error))
        with self._lock:
            del self._on_trial[asked]
            self._stats.num_compiled += isinstance(error, ConstraintError)
            self._stats.compile_seconds += time.perf_counter() - begun_at

    def mask(self, asked: StructuredOutputs) -> GrammarMask:
        """Return a mask at the beginning of what is asked for. Waits for its trial, if there is to
        be one.

        Raises:
            ConstraintError: it is no schema, expression or grammar, has a part that is not
                supported, cannot be satisfied, or is too complex; says where.
            QueueFullError, EngineError: it could not be tried now.
        """
        known = self._known.get(asked)
        if known is None and self._is_to_be_tried(asked):
            known = self._tried(asked)
        if (
            known is None
            or isinstance(known, _Tried)
            or (isinstance(known, _Grammar) and known.is_stale)
        ):
            known = self._compile(asked, known)
        if isinstance(known, _Refused):
            raise copy(known.error)  # one that was raised before has a traceback
        return known.mask(self._stats)

    def _tried(self, asked: StructuredOutputs) -> _Known:
        """Return what a trial says. Who calls this has time."""
        busy = QueueFullError("there was no time to compile the constraint")
        for _ in range(_MAX_ATTEMPTS):
            if (trial := self.try_out(asked)) is None:
                if (known := self._known.get(asked)) is not None:
                    return known  # by now
                continue
            try:
                return _Tried(trial.result())
            except ConstraintError as error:
                return _Refused(error)
            except QueueFullError as error:
                busy = error
        raise busy

    def _compile(
        self, asked: StructuredOutputs, known: _Tried | _Grammar | None
    ) -> _Grammar | _Refused:
        vocabulary, begun_at = self.vocabulary(), time.perf_counter()
        compiled: _Grammar | _Refused
        try:
            grammar = None if known is None else known.grammar
            compiled = _Grammar(grammar, asked, vocabulary, self._give_up)
        except ConstraintError as error:
            compiled = _Refused(error)
        with self._lock:
            self._stats.num_compiled += 1
            self._stats.compile_seconds += time.perf_counter() - begun_at
        self._known.put(asked, compiled)
        return compiled

    def _give_up(self, asked: StructuredOutputs, why: str) -> None:
        """Refuse a constraint from now on: it was too complex for an answer."""
        error = ConstraintError(
            f"is too complex: {why}", f"structured_outputs.{asked.constraint.kind}", "too_complex"
        )
        self._known.put(asked, _Refused(error))


@dataclass(frozen=True, slots=True)
class _Refused:
    """A constraint that cannot be."""

    error: ConstraintError
    num_bytes: int = 1 << 10


@dataclass(frozen=True, slots=True)
class _Tried:
    """A constraint that was tried, and can be compiled."""

    grammar: TriedGrammar

    @property
    def num_bytes(self) -> int:
        return 2 * len(self.grammar.source.text)


class _Grammar:
    """A grammar at its beginning, of which masks are copies; see `GrammarOrigin`.

    They share the states of its lexer. When these are used up, it is stale, and those that meet
    that go on with a lexer of their own, if it is made quickly.
    """

    def __init__(
        self,
        grammar: TriedGrammar | None,
        asked: StructuredOutputs,
        vocabulary: GrammarVocabulary,
        give_up: Callable[[StructuredOutputs, str], None],
    ):
        begun_at = time.thread_time()
        if grammar is None:
            source = source_of(asked, vocabulary.special_ids, vocabulary.stop_token_ids)
        else:
            source = grammar.source
        self._start = compile_source(source, asked, vocabulary)
        seconds = time.thread_time() - begun_at
        self.grammar = grammar or TriedGrammar.unmeasured(source, seconds)
        self._source, self._asked, self._vocabulary = source, asked, vocabulary
        self._give_up = give_up
        self.is_stale = False
        self._num_masks = 0
        self._is_quick = seconds <= _QUICK_SECONDS
        self._openings = [opening.encode() for opening in source.openings if opening]
        self._has_numbers = bool(source.openings)

    @property
    def num_bytes(self) -> int:
        return 2 * len(self._source.text) + self.grammar.bytes_after(self._num_masks)

    def mask(self, stats: ConstraintStats) -> GrammarMask:
        vocabulary = self._vocabulary
        numbers = NumberRuns(vocabulary.digits, self._openings) if self._has_numbers else None
        encode = vocabulary.tokens.tokenize_bytes
        sizes = vocabulary.vocab_size, stats, numbers, encode, vocabulary.executor
        return GrammarMask(self._start, *sizes, has_end=self._source.has_end, origin=self)

    def count_mask(self) -> None:
        self._num_masks += 1

    def renewed(self) -> LLMatcher | None:
        self.is_stale = True
        if not self._is_quick:
            return None
        return compile_source(self._source, self._asked, self._vocabulary)

    def give_up(self, why: str) -> None:
        self._give_up(self._asked, why)


_Known: TypeAlias = _Refused | _Tried | _Grammar


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
        step_max_items=5_000 if has_rules else 10_000,
        max_items_in_row=500 if has_rules else 1_000,
        max_lexer_states=20_000,  # 1 to 2 kB each
        max_grammar_size=200_000,
        verbose_errors=False,
    )
