"""JSON, read strictly and written exactly.

Reading: RFC 8259 and nothing else (no NaN, no Infinity, no byte order mark), no object with the
same key twice, no number that becomes infinite, a bounded depth. Lone surrogates, which are no
characters, become U+FFFD, so that all text can be written as UTF-8.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from octavo.server.http.errors import HttpError
from octavo.text.unicode import clean_text

MAX_DEPTH = 64
# Bounds above what requests need. Making a million small objects, collecting garbage among them, or
# saying of each what is wrong with it would hold up all other requests for a second.
MAX_VALUES = 1 << 20
MAX_CONTAINERS = 1 << 15  # lists and objects
MAX_KEYS = 1 << 12  # of one object
MAX_ALL_KEYS = 1 << 16
MAX_STRINGS = 1 << 17  # keys too
_PIECE = 1 << 14  # characters

_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
encode = _encoder.encode


def encode_in_pieces(value: Any, levels: int = 5) -> str:
    """Encode like `encode`, but with the outer levels taken apart in Python.

    For large values in a background thread: no other thread can run during one `encode`.
    """
    if levels and isinstance(value, list):
        return f"[{','.join(encode_in_pieces(item, levels - 1) for item in value)}]"
    if levels and isinstance(value, dict):
        items = (
            f"{encode(key)}:{encode_in_pieces(item, levels - 1)}" for key, item in value.items()
        )
        return f"{{{','.join(items)}}}"
    return encode(value)


def parse(body: bytes) -> Any:
    """Return the value that a request's body holds.

    Raises:
        HttpError: 400, if it is not valid JSON or too large.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _refuse(f"not UTF-8 at byte {error.start}") from None
    _check_size(body)
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        raise _refuse(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _refuse(f"nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:  # an integer of thousands of digits
        raise _refuse("a number is too large") from None
    if _num_containers(body) > MAX_DEPTH:
        _check_depth(value)
    return _without_surrogates(value) if b"\\u" in body and not _is_unicode(value) else value


def _check_size(body: bytes) -> None:
    if _excess(body) is None:
        return
    # There are too many commas, brackets, quotes or colons, but they may be within strings.
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 2 * MAX_STRINGS:
        raise _refuse(f"more than {MAX_STRINGS} strings")
    outside = b" ".join(unescaped.split(b'"')[::2])
    if (excess := _excess(outside)) is not None:
        raise _refuse(f"more than {excess}")


def _excess(body: bytes) -> str | None:
    """Return what there is too much of, if no comma, bracket or colon is within a string; else
    None."""
    if body.count(b",") >= MAX_VALUES:
        return f"{MAX_VALUES} values"
    if _num_containers(body) > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS} lists and objects"
    if body.count(b'"') - body.count(rb"\"") > 2 * MAX_STRINGS:
        return f"{MAX_STRINGS} strings"
    return f"{MAX_ALL_KEYS} keys" if body.count(b":") > MAX_ALL_KEYS else None


def _num_containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _refuse(reason: str) -> HttpError:
    return HttpError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _refuse(f"{name} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _refuse("a number is too large")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _refuse(f"more than {MAX_KEYS} keys in an object")
    value = dict(pairs)
    if len(value) < len(pairs):
        for key, _ in pairs:
            if key not in value:
                raise _refuse(f"the key {key[:40]!r} occurs twice in an object")
            del value[key]
    return value


def _integer(digits: str) -> int:
    # In Python, so that other threads can run between two calls: a body may hold a million token
    # ids.
    return int(digits)


_decoder = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_float=_finite,
    parse_int=_integer,
    object_pairs_hook=_distinct,
)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise _refuse(f"nested more than {MAX_DEPTH} levels deep")


def _is_unicode(value: Any) -> bool:
    """True if all text of a value, keys included, can be written as UTF-8."""
    try:
        encode(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        pieces = (value[at : at + _PIECE] for at in range(0, len(value), _PIECE))
        return "".join(map(clean_text, pieces))  # other threads can run between two
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _without_surrogates(item) for key, item in value.items()}
    return value
