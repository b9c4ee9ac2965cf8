"""Expressions of JSON schemas as llguidance reads them rightly."""

from __future__ import annotations

import re

# An escape, an opening bracket that negates, or any other bracket.
_PIECE = re.compile(r"\\.|\[\^\]?|[\[\]]", re.DOTALL)


def without_nul(pattern: str) -> str:
    r"""Return an expression in which no class of characters has the character NUL.

    llguidance 1.9 takes the escapes of quotes and of backslashes in JSON texts for characters of
    each class that has all control characters: ``[^"]`` would allow ``\"``.
    """
    parts: list[str] = []
    at = depth = 0
    begin = -1  # where a class that does not negate begins
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        parts.append(pattern[at : found.start()])
        at = found.end()
        if piece.startswith("[^") and not depth:
            parts.append(r"[^\x00" + piece[2:].replace("]", r"\]"))  # it is a character there
            depth = 1
            continue
        if piece[0] == "[":
            if not depth:
                begin = len(parts)
            depth += 1
        elif piece == "]" and depth:
            depth -= 1
            if not depth and begin >= 0:
                inner = "".join(parts[begin:])
                if r"\x" in inner or r"\u" in inner or any(ord(c) < 32 for c in inner):
                    parts[begin:] = [f"[{inner}", r"]--\x00"]
                begin = -1
        parts.append(piece)
    return "".join(parts) + pattern[at:]
