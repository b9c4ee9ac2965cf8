"""Constraints as llguidance reads them: `source_of` makes its text of what a request asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.beginnings import after
from octavo.grammars.endless import may_be_endless
from octavo.grammars.gbnf import is_gbnf, to_lark
from octavo.grammars.json_schema import json_options, parse_schema
from octavo.grammars.lark import LarkGrammar
from octavo.grammars.lark_schemas import with_rewritten_schemas
from octavo.grammars.structural_tags import StructuralTags

_NEWLINES = r"/[ \n\r\t]{0,8}/"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The text of a grammar.

    ``openings`` has the texts after which an answer has JSON: the empty one where all of it is
    JSON, and none where it has none, or where digits may go on. ``has_rules`` is true if the
    request has rules of its own; ``has_end`` if each text that must come has one.
    """

    text: str
    openings: tuple[str, ...] = ()
    has_rules: bool = False
    has_end: bool = True


def source_of(
    asked: StructuredOutputs, special_ids: Mapping[str, int], stop_token_ids: tuple[int, ...]
) -> GrammarSource:
    """Return the grammar of what is asked for.

    Args:
        special_ids: the model's special tokens by their text.
        stop_token_ids: those of them that end an answer.

    Raises:
        ConstraintError: it is no schema, expression or grammar, or has a part that is not
            supported; says which and where.
    """
    kind, text = asked.constraint
    openings: list[str] = []
    grammar = LarkGrammar(special_ids)
    if kind == "structural_tag":
        tags = StructuralTags(
            grammar, lambda kind, text, place: _embedded(grammar, asked, kind, text, place)
        )
        answer, openings = tags.expression(text), tags.openings
    else:
        try:
            source = _SOURCES[kind](asked, text)
        except ConstraintError as error:
            raise ConstraintError(str(error), f"structured_outputs.{kind}", error.reason) from None
        openings = [asked.begins_after or ""] if kind == "json" else []
        answer = grammar.embed(source)
        is_behind_free_text = asked.begins_after is not None and asked.preamble is None
        if kind == "json" and is_behind_free_text:  # models write newlines there
            answer = f"{grammar.terminal(_NEWLINES)} {answer}"
    if asked.preamble is not None:
        answer = f"{grammar.embed(asked.preamble)} {grammar.rule(answer)}"
    elif asked.begins_after is not None:
        whole = grammar.rule(answer)
        answer = after(grammar, asked.begins_after, whole, stop_token_ids)
        if asked.begins_with is not None:
            answer = f"{grammar.text(asked.begins_with)} ({answer}) | {whole}"
    has_rules = kind == "grammar" or (kind == "structural_tag" and '"grammar"' in text)
    has_end = not has_rules or (kind == "grammar" and not may_be_endless(source))
    return GrammarSource(grammar.source(answer), _bounded(asked, openings), has_rules, has_end)


def _bounded(asked: StructuredOutputs, openings: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(openings)) if asked.is_bounded else ()


def _embedded(
    grammar: LarkGrammar, asked: StructuredOutputs, kind: str, text: str, place: str
) -> str:
    """Add a constraint within a structural tag to its grammar."""
    try:
        return grammar.embed(_SOURCES[kind](asked, text))
    except ConstraintError as error:
        message = f"at {place}: {error}"
        raise ConstraintError(message, "structured_outputs.structural_tag", error.reason) from None


def _json_source(asked: StructuredOutputs, text: str) -> str:
    from llguidance import LLMatcher

    schema = parse_schema(text, closes_objects=asked.disable_additional_properties).schema
    options = json_options(is_bounded=asked.is_bounded, whitespace=asked.whitespace_pattern)
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
        options.pop("whitespace_pattern", None)
    try:
        source: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConstraintError(str(error)) from None
    return source


def _regex_source(asked: StructuredOutputs, expression: str) -> str:
    from llguidance import LLMatcher

    source: str = LLMatcher.grammar_from_regex(expression)
    return source


def _choice_source(asked: StructuredOutputs, choices: str) -> str:
    texts = [json.dumps(each, ensure_ascii=False) for each in json.loads(choices)]
    return "start: CHOICE\nCHOICE: " + " | ".join(texts)


def _grammar_source(asked: StructuredOutputs, grammar: str) -> str:
    return to_lark(grammar) if is_gbnf(grammar) else with_rewritten_schemas(grammar)


_SOURCES: dict[str, Callable[[StructuredOutputs, str], str]] = {
    "json": _json_source,
    "regex": _regex_source,
    "choice": _choice_source,
    "grammar": _grammar_source,
}
