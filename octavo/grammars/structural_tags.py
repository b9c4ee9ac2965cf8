"""Grammars of structural tags: free text in which tags come, and what holds within these.

Both of vLLM's notations are read: the older one, an object with ``structures`` and ``triggers``;
and that of xgrammar, ``{"type": "structural_tag", "format": ...}``, whose formats are the functions
of `_FORMATS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.base.errors import ConstraintError
from octavo.grammars.lark import LarkGrammar

_FIELD = "structured_outputs.structural_tag"


class StructuralTags:
    """The grammar of one structural tag, put together in a `LarkGrammar`.

    Args:
        embed: adds a constraint, by its kind ("json", "regex" or "grammar") and its text, to the
            grammar, and returns its expression.

    ``openings`` has the texts after which JSON comes.
    """

    def __init__(self, grammar: LarkGrammar, embed: Callable[[str, str, str], str]):
        self._grammar = grammar
        self._embed = embed
        self.openings: list[str] = []
        self._opening = ""  # the text before what is being read

    def expression(self, text: str) -> str:
        """Return the expression of a structural tag, which is JSON.

        Raises:
            ConstraintError: it is none, or has a part that is not supported; says which and where.
        """
        try:
            tag = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid("#", f"no JSON: {error}") from None
        if not isinstance(tag, dict):
            raise _invalid("#", "not an object")
        if "structures" in tag or "triggers" in tag:
            return self._older(tag)
        _check_keys(tag, "#", {"type", "format"})
        if tag.get("type") != "structural_tag":
            raise _invalid("#/type", f"{tag.get('type')!r:.60}, not 'structural_tag'")
        return self._format(tag.get("format"), "#/format")

    def _older(self, tag: Mapping[str, Any]) -> str:
        _check_keys(tag, "#", {"type", "structures", "triggers"})
        tags = []
        for number, each in enumerate(_list(tag, "structures", "#")):
            at = f"#/structures/{number}"
            _check_keys(_object(each, at), at, {"begin", "schema", "end"})
            content = {"type": "json_schema", "json_schema": each.get("schema", {})}
            tags.append(
                {"begin": each.get("begin"), "content": content, "end": each.get("end", "")}
            )
        triggers = _texts(_list(tag, "triggers", "#"), "#/triggers")
        return self._triggered(tags, triggers, "#/structures")

    # -- formats -----------------------------------------------------------------------------

    def _format(self, value: Any, at: str) -> str:
        kind = _object(value, at).get("type")
        known = _FORMATS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise ConstraintError(
                f"the format {kind!r:.60} at {at} is not supported; {', '.join(_FORMATS)} are",
                _FIELD,
                "unsupported",
            )
        make, keys = known
        _check_keys(value, at, {"type", *keys})
        return make(self, value, at)

    def _const_string(self, value: Mapping[str, Any], at: str) -> str:
        text = _text(value, "value", at)
        self._opening = text
        return self._grammar.text(text)

    def _json_schema(self, value: Mapping[str, Any], at: str) -> str:
        schema = value.get("json_schema")
        if not isinstance(schema, Mapping | bool):
            raise _invalid(f"{at}/json_schema", "no schema")
        if self._opening:
            self.openings.append(self._opening)
        return self._embed("json", json.dumps(schema), f"{at}/json_schema")

    def _regex(self, value: Mapping[str, Any], at: str) -> str:
        return self._embed("regex", _text(value, "pattern", at), f"{at}/pattern")

    def _grammar_of(self, value: Mapping[str, Any], at: str) -> str:
        return self._embed("grammar", _text(value, "grammar", at), f"{at}/grammar")

    def _any_text(self, value: Mapping[str, Any], at: str) -> str:
        return self._grammar.free_text(*_texts(value.get("excludes") or [], f"{at}/excludes"))

    def _sequence(self, value: Mapping[str, Any], at: str) -> str:
        parts = []
        for number, each in enumerate(_list(value, "elements", at)):
            parts.append(f"({self._format(each, f'{at}/elements/{number}')})")
        return " ".join(parts)

    def _or(self, value: Mapping[str, Any], at: str) -> str:
        opening, parts = self._opening, []
        for number, each in enumerate(_list(value, "elements", at)):
            self._opening = opening
            parts.append(f"({self._format(each, f'{at}/elements/{number}')})")
        return " | ".join(parts)

    def _repeated(self, value: Mapping[str, Any], at: str) -> str:
        sign = {"optional": "?", "star": "*", "plus": "+"}[value["type"]]
        return f"({self._format(value.get('content'), f'{at}/content')}){sign}"

    def _tag(self, value: Mapping[str, Any], at: str) -> str:
        return f"{self._grammar.text(_text(value, 'begin', at))} {self._rest(value, at)}"

    def _rest(self, value: Mapping[str, Any], at: str) -> str:
        """Return what comes after the begin of a tag: its content, and its end."""
        end = value.get("end", "")
        ends = _texts(end if isinstance(end, list) else [end], f"{at}/end", may_be_empty=True)
        self._opening = _text(value, "begin", at)
        content = _object(value.get("content"), f"{at}/content")
        if content.get("type") == "any_text" and any(ends):
            _check_keys(content, f"{at}/content", {"type"})
            if not all(ends):
                raise _invalid(f"{at}/end", "any text, or none: leave the empty text out")
            return "(" + " | ".join(map(self._grammar.text_up_to, ends)) + ")"
        inner = self._format(content, f"{at}/content")
        return f"({inner}) ({' | '.join(map(self._grammar.text, ends))})"

    def _triggered_tags(self, value: Mapping[str, Any], at: str) -> str:
        return self._triggered(
            _list(value, "tags", at),
            _texts(_list(value, "triggers", at), f"{at}/triggers"),
            f"{at}/tags",
            at_least_one=_flag(value, "at_least_one", at),
            stop_after_first=_flag(value, "stop_after_first", at),
        )

    def _triggered(
        self,
        tags: Sequence[Any],
        triggers: Sequence[str],
        at: str,
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> str:
        """Return the expression of free text with tags, each of which begins with a trigger."""
        grammar = self._grammar
        rests: dict[str, list[str]] = {}
        wholes: list[str] = []
        for number, tag in enumerate(tags):
            place = f"{at}/{number}"
            _check_keys(_object(tag, place), place, {"type", "begin", "content", "end"})
            begin = _text(tag, "begin", place)
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not found:
                raise _invalid(f"{place}/begin", f"{begin!r:.80}, which begins with no trigger")
            trigger = min(found, key=len)
            rest = self._rest(tag, place)
            rests.setdefault(trigger, []).append(f"{grammar.text(begin[len(trigger) :])} {rest}")
            wholes.append(f"{grammar.text(begin)} {rest}")
        one = grammar.rule(
            " | ".join(
                f"{grammar.text_up_to(trigger)} ({' | '.join(each)})"
                for trigger, each in rests.items()
            )
        )
        text = grammar.free_text(*triggers)
        whole = " | ".join(wholes)
        if stop_after_first:
            return f"({whole})" if at_least_one else f"({one} | {text})"
        return f"({whole}) {one}* {text}" if at_least_one else f"{one}* {text}"

    def _tags_with_separator(self, value: Mapping[str, Any], at: str) -> str:
        tags = []
        for number, each in enumerate(_list(value, "tags", at)):
            place = f"{at}/tags/{number}"
            _check_keys(_object(each, place), place, {"type", "begin", "content", "end"})
            tags.append(self._tag(each, place))
        one = self._grammar.rule(" | ".join(tags))
        separator = self._grammar.text(_text(value, "separator", at, may_be_empty=True))
        several = one if _flag(value, "stop_after_first", at) else f"{one} ({separator} {one})*"
        return f"({several})" if _flag(value, "at_least_one", at) else f"({several})?"


_Format = tuple[Callable[[StructuralTags, Mapping[str, Any], str], str], tuple[str, ...]]
_FORMATS: dict[str, _Format] = {
    "const_string": (StructuralTags._const_string, ("value",)),
    "json_schema": (StructuralTags._json_schema, ("json_schema",)),
    "regex": (StructuralTags._regex, ("pattern",)),
    "grammar": (StructuralTags._grammar_of, ("grammar",)),
    "any_text": (StructuralTags._any_text, ("excludes",)),
    "sequence": (StructuralTags._sequence, ("elements",)),
    "or": (StructuralTags._or, ("elements",)),
    "optional": (StructuralTags._repeated, ("content",)),
    "star": (StructuralTags._repeated, ("content",)),
    "plus": (StructuralTags._repeated, ("content",)),
    "tag": (StructuralTags._tag, ("begin", "content", "end")),
    "triggered_tags": (
        StructuralTags._triggered_tags,
        ("triggers", "tags", "at_least_one", "stop_after_first"),
    ),
    "tags_with_separator": (
        StructuralTags._tags_with_separator,
        ("tags", "separator", "at_least_one", "stop_after_first"),
    ),
}


def _invalid(at: str, what: str) -> ConstraintError:
    return ConstraintError(f"has at {at} {what}", _FIELD)


def _object(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _invalid(at, "no object")
    return value


def _check_keys(value: Mapping[str, Any], at: str, known: set[str]) -> None:
    if unknown := sorted(value.keys() - known):
        raise ConstraintError(
            f"{unknown[0]!r} at {at} is not supported; {', '.join(sorted(known))} are",
            _FIELD,
            "unsupported",
        )


def _list(value: Mapping[str, Any], key: str, at: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list) or not found:
        raise _invalid(f"{at}/{key}", "no list, or an empty one")
    return found


def _texts(values: Any, at: str, *, may_be_empty: bool = False) -> list[str]:
    if not isinstance(values, list) or not all(
        isinstance(each, str) and (each or may_be_empty) for each in values
    ):
        raise _invalid(at, "something else than texts")
    return values


def _text(value: Mapping[str, Any], key: str, at: str, *, may_be_empty: bool = False) -> str:
    found = value.get(key)
    if not isinstance(found, str) or not (found or may_be_empty):
        raise _invalid(f"{at}/{key}", "no text")
    return found


def _flag(value: Mapping[str, Any], key: str, at: str) -> bool:
    found = value.get(key, False)
    if not isinstance(found, bool):
        raise _invalid(f"{at}/{key}", "neither true nor false")
    return found
