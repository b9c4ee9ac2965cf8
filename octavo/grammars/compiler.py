"""`GrammarCompiler`, which makes grammars of the constraints that requests ask for.

The grammars themselves are those of llguidance: an Earley parser over a lexer of regular
expressions' derivatives, walked together with a trie of the vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from octavo.base.errors import InvalidRequestError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.grammar_mask import GrammarMask
from octavo.grammars.vocabulary import GrammarVocabulary
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

_MAX_CACHED = 256  # grammars


class GrammarCompiler:
    """Compiles the constraints of one model's requests. Any threads may share it.

    Equal constraints are compiled once. The first one also waits for the vocabulary, about a
    second for 150,000 tokens.

    Args:
        vocab_size, stop_token_ids: see `GrammarVocabulary`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Collection[int]):
        self._open: Callable[[], GrammarVocabulary] = lambda: GrammarVocabulary(
            tokenizer, vocab_size, stop_token_ids
        )
        self._vocabulary: GrammarVocabulary | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    def vocabulary(self) -> GrammarVocabulary:
        """Return the vocabulary, which is made at the first call."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._open()
            return self._vocabulary

    def mask(self, asked: StructuredOutputs) -> GrammarMask:
        """Return a mask at the beginning of what is asked for.

        Raises:
            InvalidRequestError: it is no schema, expression or grammar, has a part that is not
                supported, or is too complex; says where.
        """
        vocabulary = self.vocabulary()
        with self._lock:
            matcher = self._compiled.get(asked)
            if matcher is not None:
                self._compiled.move_to_end(asked)
        if matcher is None:
            matcher = _compile(asked, vocabulary)
            with self._lock:
                self._compiled[asked] = matcher
                while len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
        return GrammarMask(matcher.deep_copy(), vocabulary.vocab_size)


def _compile(asked: StructuredOutputs, vocabulary: GrammarVocabulary) -> LLMatcher:
    from llguidance import LLMatcher

    kind, text = asked.constraint
    field = f"structured_outputs.{kind}"
    try:
        source = _SOURCES[kind](asked, text)
    except ValueError as error:
        raise InvalidRequestError(str(error), field) from None
    matcher = LLMatcher(vocabulary.tokens, source, log_level=0, limits=_limits())
    if matcher.is_error():
        raise InvalidRequestError(matcher.get_error(), field)
    return matcher


def _limits() -> LLParserLimits:
    """Return bounds on the time and the memory of one grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # some 20 ms
        step_lexer_fuel=100_000,  # some 7 ms
        step_max_items=20_000,  # 1 ms
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _json_source(asked: StructuredOutputs, schema: str) -> str:
    from llguidance import LLMatcher

    options: dict[str, Any] = {}
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    elif asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    source: str = LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    return source


def _regex_source(asked: StructuredOutputs, expression: str) -> str:
    from llguidance import LLMatcher

    source: str = LLMatcher.grammar_from_regex(expression)
    return source


def _choice_source(asked: StructuredOutputs, choices: str) -> str:
    from llguidance import LLMatcher

    texts = [json.dumps(each, ensure_ascii=False) for each in json.loads(choices)]
    source: str = LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    return source


def _grammar_source(asked: StructuredOutputs, grammar: str) -> str:
    from llguidance import grammar_from

    return grammar_from("grammar", grammar)


_SOURCES: dict[str, Callable[[StructuredOutputs, str], str]] = {
    "json": _json_source,
    "regex": _regex_source,
    "choice": _choice_source,
    "grammar": _grammar_source,
}
