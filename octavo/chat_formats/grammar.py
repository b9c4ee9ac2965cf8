"""`Grammar`, in which formats write the grammars of their answers: Lark as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from octavo.chat_formats.json_schemas import closed, without_annotations, without_backtracking
from octavo.chat_formats.tools import Tool

# As `json.dumps` writes, and so chat templates do: models have hardly seen another.
_DENSE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# A newline and an indentation; a model that goes on with white space for ever comes to an end.
_LOOSE: dict[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{1,40}"}
_LENIENT = {"lenient": True, "coerce_one_of": True}
# Calls of one answer, behind which is text alone, so that a model that repeats itself ends.
MAX_CALLS = 64
_ANY = "/(?s:.*)/"
_GAP = r"/[ \n]{1,2}/"


class Grammar:
    """The rules of one grammar. Methods return expressions, of which further rules are made.

    Control tokens are no text to a grammar: nothing but their ids leads to them, and free text has
    none. Other tags are text, although they may be tokens.

    Args:
        special_tokens: ids of control tokens by text.
        is_lenient: whether keywords of schemas that no grammar can follow are forgotten, and not
            refused.
        tools: whose parameters it has, for errors.
    """

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        *,
        is_lenient: bool = False,
        tools: Iterable[Tool] = (),
    ):
        self.is_lenient = is_lenient
        self._owners = {id(tool.parameters): f"the parameters of {tool.name!r}" for tool in tools}
        self._special_tokens = special_tokens
        self._names: dict[str, str] = {}  # of rules, and of terminals, by what they are

    def rule(self, body: str) -> str:
        """Return the name of a rule."""
        return self._name("rule", "", body)

    def terminal(self, body: str) -> str:
        """Return the name of a terminal: one regular expression."""
        return self._name("TERMINAL", "", body)

    def pattern(self, expression: str) -> str:
        """Return text that a regular expression matches as a whole."""
        return self.terminal(f"/{escape_slashes(expression)}/")

    def _name(self, kind: str, options: str, body: str) -> str:
        definition = f"{options}: {body}"
        name = self._names.get(definition)
        if name is None:
            name = self._names[definition] = f"{kind}_{len(self._names)}"
        return name

    def text(self, text: str) -> str:
        """Return a fixed text; control tokens in it are tokens."""
        return " ".join(
            f"<[{self._special_tokens[part]}]>" if part in self._special_tokens else literal(part)
            for part in self._split(text)
        )

    def _split(self, text: str) -> list[str]:
        found = sorted((s for s in self._special_tokens if s and s in text), key=len, reverse=True)
        if not found:
            return [text] if text else []
        return [part for part in re.split(f"({'|'.join(map(re.escape, found))})", text) if part]

    def json(
        self, schema: Mapping[str, Any], *, is_loose: bool = False, is_lenient: bool | None = None
    ) -> str:
        """Return the JSON of a schema. Objects have no properties but those that are named, where
        the schema leaves that open.

        Args:
            is_loose: with any white space; else with a space after commas and colons and no other.
            is_lenient: that of the grammar, if not said.
        """
        options = _LOOSE if is_loose else _DENSE
        owner = self._owners.get(id(schema))
        schema = closed(without_annotations(schema))
        if self.is_lenient if is_lenient is None else is_lenient:
            options, schema = {**options, **_LENIENT}, without_backtracking(schema)
        schema = {**schema, "x-guidance": options}
        if owner is not None:
            schema["$comment"] = owner
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def free(self, without: Set[str] = frozenset(), not_like: str = "") -> str:
        """Return free text, which may be empty.

        Args:
            without: tags that are not in it. Those that are control tokens are not spelled out
                either: a parser, which sees text, would take that for them.
            not_like: a regular expression that the text as a whole does not match.
        """
        banned = [f"(?s:.*)({'|'.join(map(exactly, sorted(without)))})(?s:.*)"] if without else []
        if not_like:
            banned.append(not_like)
        return self.terminal(f"{_ANY} & ~/{escape_slashes('|'.join(banned))}/" if banned else _ANY)

    def without(self, text: str) -> str:
        """Return the regular expression of all that does not contain a text."""
        return f"~/{escape_slashes(f'(?s:.*){exactly(text)}(?s:.*)')}/"

    def lazy(self, expression: str) -> str:
        """Return a lexeme that ends as soon as the expression matches."""
        return self._name("rule", "[lazy]", expression)

    def up_to(self, tag: str, without: Set[str] = frozenset(), not_like: str = "") -> str:
        """Return free text that ends with the first of a tag.

        Args:
            without: other tags that are not in it.
            not_like: see `free`; of the text before the tag.
        """
        # What goes on without the tag must be the same lexeme, where that ends with a token.
        without = without | {tag} if self.has_token(tag) else without - {tag}
        return self.text_up_to(self.free(without, not_like), tag)

    def text_up_to(self, expression: str, end: str) -> str:
        """Return text of a regular expression and what ends it.

        Both are one lexeme, as the text could go on with the end's first characters; but for a
        control token in the end, and what is behind that.
        """
        if not self.has_token(end):
            return self.lazy(f"({expression}) {literal(end)}")
        parts = self._split(end)
        at = next(i for i, part in enumerate(parts) if part in self._special_tokens)
        before, after = "".join(parts[:at]), "".join(parts[at:])
        if before:
            expression = f"({expression}) {literal(before)}"
        return f"{self.terminal(expression)} {self.text(after)}"

    def has_token(self, text: str) -> bool:
        """Tell whether a control token is in a text."""
        return any(part in self._special_tokens for part in self._split(text))

    def gap(self) -> str:
        """Return the white space that may stand between parts."""
        return self.terminal(_GAP) + "?"

    def after_gap(self, text: str) -> str:
        """Return a fixed text, maybe with white space before it, where free text may be instead:
        white space alone would already be taken for the beginning of that."""
        if self._split(text)[0] in self._special_tokens:
            return f"{self.gap()} {self.text(text)}"
        return self.terminal(f"({_GAP})? {literal(text)}")

    def source(self, start: str) -> str:
        """Return the grammar of answers that are ``start``."""
        rules = (f"{name}{definition}" for definition, name in self._names.items())
        return "\n".join(["%llguidance {}", f"start: {start}", *rules]) + "\n"


def literal(text: str) -> str:
    """Return a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def exactly(text: str) -> str:
    """Return a regular expression of just this text."""
    return "".join(
        character if character.isalnum() or ord(character) > 127 else rf"\x{ord(character):02x}"
        for character in text
    )


def escape_slashes(expression: str) -> str:
    """Return a regular expression as it stands between the slashes of Lark."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", "\\n")


def more_calls(call: str, *, are_allowed: bool) -> str:
    """Return an expression of the calls that may follow the first, which is empty if there may be
    none."""
    return f"({call}){{0,{MAX_CALLS - 1}}}" if are_allowed else ""


def either(options: Iterable[str]) -> str:
    """Return an expression that is one of several."""
    options = list(options)
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
