"""Arguments as text between tags: strings as they are, and everything else as JSON.

The type in the tool's schema tells which. Where it allows for strings and others, a text that is
JSON of one of these others is that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.chat_formats.grammar import Grammar, either, escape_slashes, literal
from octavo.chat_formats.json_schemas import (
    BACKTRACKING,
    DEFINITIONS,
    resolved,
    type_of,
    types_of,
)
from octavo.chat_formats.text_stream import MalformedCall, Put, Reading, Tags, TextStream, load_json

# Keywords that could say of a string what cannot be said of text.
_UNSUPPORTED = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if")
# Beginnings of texts that would be JSON of other types.
_BEGINNINGS = {"number": "[-0-9]", "array": r"\[", "object": r"\{"}
_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_WORDS = {"null": ("null",), "boolean": ("true", "false")}


def read_tagged_value(
    stream: TextStream, ends: Tags, schema: Mapping[str, Any], put: Put
) -> Reading[str]:
    """Read a value up to and with an end tag, and hand its JSON to ``put`` in pieces.

    Raises:
        MalformedCall: no end tag follows, or the text is no value of a type in the schema.

    Returns:
        The end tag.
    """
    types = types_of(schema)
    if types == {"string"}:
        put('"')
        tag = yield from stream.up_to(ends, lambda text: put(json_inside(text)))
        put('"')
    else:
        is_json = yield from _read_brackets(stream, ends, types, put)
        parts: list[str] = []
        tag = yield from stream.up_to(ends, parts.append)
        if not is_json:
            put(_json_of("".join(parts), types))
    if not tag:
        raise MalformedCall("the text ends within an argument")
    return tag


def _read_brackets(
    stream: TextStream, ends: Tags, types: frozenset[str], put: Put
) -> Reading[bool]:
    """Read a list or an object, of which strings may have an end tag in them.

    Returns:
        False if there is none, and nothing was read.

    Raises:
        MalformedCall: what begins like one is none, and no string either.
    """
    first = yield from stream.peek()
    if not first or {"[": "array", "{": "object"}.get(first) not in types:
        return False
    if "string" not in types:
        yield from stream.json_value(put)
        yield from stream.skip_space()
        yield from _expect_end(stream, ends)
        return True
    parts: list[str] = []
    try:
        yield from stream.json_value(parts.append)
        value = "".join(parts)
        load_json(value)
        yield from stream.skip_space(parts.append)
        yield from _expect_end(stream, ends)
    except MalformedCall:  # it is a string then
        stream.back("".join(parts))
        return False
    put(value)
    return True


def _expect_end(stream: TextStream, ends: Tags) -> Reading[None]:
    if not (yield from stream.is_at(ends)):
        raise MalformedCall("an argument goes on after its JSON")


def json_inside(text: str) -> str:
    """Return a piece of a string as it stands in JSON between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str, types: frozenset[str]) -> str:
    stripped = text.strip()
    try:
        if type_of(load_json(stripped)) in types - {"string"}:
            return stripped
    except MalformedCall:
        if "string" not in types:
            if types == {"boolean"} and stripped.lower() in ("true", "false"):
                return stripped.lower()
            if "null" in types and stripped in ("None", ""):
                return "null"
            raise
    if "string" not in types:
        raise MalformedCall(f"an argument is {type_of(load_json(stripped))}")
    return json.dumps(text, ensure_ascii=False)


def tagged_value(grammar: Grammar, schema: Mapping[str, Any], end: str, where: str) -> str:
    """Return the grammar of a value and the text that ends it.

    Args:
        end: a tag, which no value contains, maybe with newlines around it.
        where: the tool and its argument, for errors.

    Raises:
        InvalidRequestError: the schema has a keyword that cannot be enforced on text.
    """
    texts, others = tagged_options(grammar, schema, end, where)
    return grammar.rule(either([*others, *texts]))


def tagged_options(
    grammar: Grammar,
    schema: Mapping[str, Any],
    end: str,
    where: str,
    *,
    are_told_apart: bool = False,
) -> tuple[list[str], list[str]]:
    """Return the grammars of values that are strings, and those of others, of which one holds.

    Args:
        end, where: see `tagged_value`.
        are_told_apart: whether the text around says which they are; else strings are none that
            would be read as others.
    """
    types = types_of(schema)
    if "string" not in types:
        return [], [f"{grammar.json(schema)} {grammar.text(end)}"]
    if not schema.keys() - DEFINITIONS:
        return [_free(grammar, frozenset(), end)], []
    texts, options = [], []
    others: frozenset[str] = frozenset() if are_told_apart else types - {"string"}
    for branch in _branches(schema):
        kinds = types_of(branch, schema)
        if kinds == {"string"}:
            texts.append(_string(grammar, branch, others, end, where))
        else:
            options += _others(grammar, branch, kinds, end)
    return texts, options


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return schemas, each of one type, one of which holds."""
    rest = dict(resolved(schema, schema))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := rest.pop(keyword, None), list):
            return [branch for option in options for branch in _branches({**rest, **option})]
    if isinstance(types := rest.get("type"), list):
        return [branch for kind in types for branch in _branches({**rest, "type": kind})]
    if isinstance(values := rest.get("enum"), list):
        kinds = dict.fromkeys(map(type_of, values))
        return [
            {**rest, "enum": [value for value in values if type_of(value) == kind]}
            for kind in kinds
            if "type" not in rest or kind in types_of({"type": rest["type"]})
        ]
    if len(types := types_of(rest)) > 1:
        return [{**rest, "type": kind} for kind in sorted(types)]
    return [rest]


def _others(
    grammar: Grammar, schema: Mapping[str, Any], kinds: frozenset[str], end: str
) -> list[str]:
    words = [word for kind in kinds for word in _WORDS.get(kind, ())]
    if "enum" in schema or "const" in schema:
        words = [word for word in words if json.loads(word) in schema.get("enum", words)]
    options = [_fixed(grammar, word, end) for word in words]
    if kinds - _WORDS.keys():
        options.append(f"{grammar.json(schema)} {grammar.text(end)}")
    return options


def _string(
    grammar: Grammar, schema: Mapping[str, Any], others: frozenset[str], end: str, where: str
) -> str:
    """Return the grammar of a string that is written as it is, where other types may be, too."""
    if "const" in schema or "enum" in schema:
        texts = [schema["const"]] if "const" in schema else schema["enum"]
        return either(_fixed(grammar, text, end) for text in texts if isinstance(text, str))
    try:
        expressions = _expressions(schema, where)
    except InvalidRequestError:
        if not grammar.is_lenient:
            raise
        expressions = []
    if not expressions:
        return _free(grammar, others, end)
    text = " & ".join([*expressions, *_unlike(others), grammar.without(end.strip("\n"))])
    return grammar.text_up_to(text, end)


def _expressions(schema: Mapping[str, Any], where: str) -> list[str]:
    """Return regular expressions of Lark's, all of which a string matches."""
    for keyword in _UNSUPPORTED:
        if keyword in schema:
            raise _error(where, repr(keyword))
    expressions = []
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if low or high != "":
        expressions.append(f"/(?s:.{{{low},{high}}})/")
    if "pattern" in schema:
        whole = in_ascii(_whole(schema["pattern"], where))
        expressions += ["/(?s:.*)/", f"/{escape_slashes(whole)}/"]
    return expressions


def _unlike(others: frozenset[str]) -> list[str]:
    """Return regular expressions of texts that are no JSON of some types, nor that and a
    newline."""
    beginnings = [_BEGINNINGS[kind] for kind in sorted(others & _BEGINNINGS.keys())]
    words = [word for kind in sorted(others & _WORDS.keys()) for word in _WORDS[kind]]
    banned = [f"({'|'.join(beginnings)})(?s:.*)"] if beginnings else []
    banned += [f"({'|'.join(words)})\\n?"] if words else []
    return [f"~/{'|'.join(banned)}/"] if banned else []


def _free(grammar: Grammar, others: frozenset[str], end: str) -> str:
    """Return any string and the text that ends it: the first tag does."""
    tag = end.strip("\n")
    banned = [grammar.without(tag)] if grammar.has_token(tag) else []
    text = " & ".join(["/(?s:.*)/", *_unlike(others), *banned])
    _, _, rest = end.partition(tag)
    return f"{grammar.text_up_to(text, tag)} {grammar.text(rest)}"


def _fixed(grammar: Grammar, text: str, end: str) -> str:
    return grammar.text_up_to(literal(text), end)


def _whole(pattern: str, where: str) -> str:
    """Return an expression of whole texts of one that is searched for in them."""
    if BACKTRACKING.search(pattern):
        raise _error(where, f"the pattern {pattern!r:.80}")
    bare = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", pattern)
    has_begin, has_end = pattern.startswith("^"), bare.endswith("$")
    inner = pattern[has_begin : len(pattern) - has_end]
    if re.search(r"[\^$]", re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", inner)) or (
        (has_begin or has_end) and _has_alternatives(bare)
    ):
        raise _error(where, f"the pattern {pattern!r:.80} with anchors inside")
    before, after = ("" if has_begin else "(?s:.*)"), ("" if has_end else "(?s:.*)")
    return f"{before}(?:{inner}){after}"


def in_ascii(pattern: str) -> str:
    """Return an expression in which digits and letters are ASCII's, as JSON schemas mean them."""
    return re.sub(r"\\.", lambda match: _CLASSES.get(match[0], match[0]), pattern, flags=re.DOTALL)


def _has_alternatives(bare: str) -> bool:
    depth = 0
    for character in bare:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and depth == 0:
            return True
    return False


def _error(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where}: {what} cannot be enforced in the format in which this model writes calls",
        "tools",
    )
