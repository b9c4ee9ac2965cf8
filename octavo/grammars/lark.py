"""`LarkGrammar`, which puts a grammar together of parts: texts, schemas, expressions, grammars.

The notation is that of llguidance: Lark's, where a special token is ``<[its id]>``, and ``@name``
is another grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Where a text must come, all tokens that it may begin with are allowed, and not only those that
# the tokenizer would write. To find out what must come has no end in some grammars.
_OPTIONS = '%llguidance {"no_forcing": true}'
# A text of any length.
_FREE = r"/(?s:.*)/"


class LarkGrammar:
    """A grammar under way: rules, and further grammars that they use.

    Methods return an expression that may stand in a rule.

    Args:
        special_ids: the special tokens of the model by their text. Where a text has one, this token
            is meant, and not its letters.
    """

    def __init__(self, special_ids: Mapping[str, int]):
        self._special_ids = special_ids
        names = sorted(filter(None, special_ids), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []

    def source(self, start: str) -> str:
        """Return the whole, which begins with the expression ``start``, as llguidance reads it."""
        text = "\n".join([_OPTIONS, f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"name": "whole", "lark_grammar": text}, *self._grammars]})

    def rule(self, expression: str) -> str:
        """Add a rule."""
        name = f"rule_{len(self._rules)}"
        self.add_rule(name, expression)
        return name

    def add_rule(self, name: str, expression: str) -> None:
        """Add a rule of this name, which others may use before it is added."""
        self._rules.append(f"{name}: {expression}")

    def terminal(self, expression: str, *, is_lazy: bool = False) -> str:
        """Add an expression over characters. A lazy one ends as soon as it can."""
        number = len(self._rules)
        name = f"lazy_{number}" if is_lazy else f"TERMINAL_{number}"
        self._rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {expression}")
        return name

    def embed(self, source: str) -> str:
        """Add a grammar as llguidance's own functions make it."""
        is_json = source.startswith('{"grammars"')
        (grammar,) = json.loads(source)["grammars"] if is_json else [{"lark_grammar": source}]
        name = f"part_{len(self._grammars)}"
        self._grammars.append({**grammar, "name": name})
        return f"@{name}"

    def parts(self, text: str) -> list[str | int]:
        """Return a text as special tokens and what stands between them."""
        found: list[str | int] = []
        at = 0
        for match in self._specials.finditer(text):
            found += [text[at : match.start()], self._special_ids[match[0]]]
            at = match.end()
        return [part for part in (*found, text[at:]) if part != ""]

    def text(self, text: str) -> str:
        """Return a text that must come, with its special tokens."""
        return " ".join(map(_part, self.parts(text))) or '""'

    def pattern_of(self, text: str) -> str:
        """Return a regular expression of just this text."""
        return f"/{_escaped(text)}/"

    def free_text(self, *without: str) -> str:
        """Return any text in which none of some texts occurs; of one with special tokens, what is
        before the first of them. Special tokens are no text."""
        texts = [part for text in without if isinstance(part := self.parts(text)[0], str)]
        if not texts:
            return self.terminal(_FREE)
        banned = "|".join(map(_escaped, texts))
        return self.terminal(f"{_FREE} & ~/(?s:.*)({banned})(?s:.*)/")

    def text_up_to(self, end: str) -> str:
        """Return any text up to the first ``end``, with it."""
        first, *rest = self.parts(end)
        if isinstance(first, int):
            return f"{self.free_text()} {self.text(end)}"
        head = self.terminal(f"{_FREE} {_part(first)}", is_lazy=True)
        return " ".join([head, *map(_part, rest)])

    def specials(self, *, without: Iterable[int] = ()) -> str | None:
        """Return any special token but some; None if there is no other."""
        ids = sorted(set(self._special_ids.values()).difference(without))
        return f"<[{','.join(map(str, ids))}]>" if ids else None


def _part(part: str | int) -> str:
    return json.dumps(part, ensure_ascii=False) if isinstance(part, str) else f"<[{part}]>"


def _escaped(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return "".join(
        character if character.isalnum() or ord(character) > 127 else rf"\x{ord(character):02x}"
        for character in text
    )
