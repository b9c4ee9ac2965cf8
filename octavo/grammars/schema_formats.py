"""Formats of JSON schemas as llguidance has them, or as expressions that say the same or less."""

from __future__ import annotations

from typing import Any

from octavo.base.errors import ConstraintError

Schema = dict[str, Any]

_KNOWN = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# By a format whose texts they all have.
_NARROWER = {
    "iri": "uri",
    "uri-reference": "uri",
    "iri-reference": "uri",
    "uri-template": "uri",
    "url": "uri",
    "idn-email": "email",
}
_LEAP = "([0-9][0-9](0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"  # of years
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9][0-9][0-9])"  # few know the year 0
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"^({_YEAR}-{_DAY}|{_LEAP}-02-29)"
# What is narrower than llguidance's own: leap years, and no leap seconds, which depend on the zone.
_BESIDE = {
    "date": f"{_DATE}$",
    "date-time": f"{_DATE}[Tt][0-9]{{2}}:[0-9]{{2}}:[0-5]",
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
}
_LABEL = "[A-Za-z0-9]+(-[A-Za-z0-9]+)*"
_PATTERNS = {
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "byte": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    # Without two hyphens in a row, behind which there is a code that not every text is.
    "idn-hostname": rf"^{_LABEL}(\.{_LABEL})*$",
}
_ANY_TEXT = frozenset(("password", "binary", "path", "file-path", "directory-path", "textarea"))
_INTEGERS = {
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
}
_FLOATS = frozenset(("float", "double", "decimal", "number"))


def schemas_of_format(name: Any, place: str) -> list[Schema]:
    """Return schemas without further formats that hold together where a format does.

    Raises:
        ConstraintError: it is none, or not supported.
    """
    if not isinstance(name, str):
        raise ConstraintError(f"has at {place}/format {name!r:.60}, which is no text")
    name = _NARROWER.get(name, name)
    found: list[Schema] = []
    if name in _KNOWN:
        found.append({"format": name})
    if pattern := _BESIDE.get(name) or _PATTERNS.get(name):
        found.append({"pattern": pattern})
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        found.append({"minimum": low, "maximum": high})
    if not found and name not in _ANY_TEXT and name not in _FLOATS:
        message = f"the format {name!r:.60} at {place} is not supported"
        raise ConstraintError(message, None, "unsupported")
    return found
