"""`clean_text`, which makes any Python string one that can be written as UTF-8."""

from __future__ import annotations


def clean_text(text: str) -> str:
    """Return ``text`` with every lone surrogate, which is no character, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
