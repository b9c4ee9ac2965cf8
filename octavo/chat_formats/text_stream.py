"""`TextStream`: text that comes in pieces, and generators that read it.

A generator that needs more text than there is yields; it goes on when more has come. What it reads
so never depends on where the text was cut, because it decides only on text that could not be read
in another way if more followed.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

from octavo.text.unicode import clean_text

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Put: TypeAlias = Callable[[str], None]

MAX_DEPTH = 256  # of lists and objects in arguments
_SPACE = re.compile(r"[ \t\r\n]+")
_STRING_PART = re.compile(r'[^"\\\x00-\x1f]+')
_PLAIN_PART = re.compile(r"[-+.0-9A-Za-z,: \t\r\n]+")
_SCALAR_PART = re.compile(r"[-+.0-9A-Za-z]+")


class MalformedCall(Exception):
    """The text is no call of the format. The message says what is wrong.

    Attributes:
        reason: for counting: ``syntax``, ``arguments``, ``unknown_tool``, ``too_large`` or
            ``cut_off``.
    """

    def __init__(self, message: str, reason: str = "syntax"):
        super().__init__(message)
        self.reason = reason


class Tags:
    """Texts that are looked for in others: the leftmost counts, of those that begin there the
    longest."""

    def __init__(self, texts: Iterable[str]):
        self.texts = frozenset(filter(None, texts))
        self._sorted = sorted(self.texts)
        self._lengths: dict[str, list[int]] = {}
        for text in self.texts:
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        for lengths in self._lengths.values():
            lengths.sort(reverse=True)
        self._longest = max(map(len, self.texts), default=0)
        first = "".join(map(re.escape, sorted(self._lengths)))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def __contains__(self, text: str) -> bool:
        return text in self.texts

    def find(self, text: str, start: int, is_whole: bool) -> tuple[int, int]:
        """Find the first tag from ``start`` on.

        Args:
            is_whole: whether no more text follows.

        Returns:
            Where the tag begins and ends. Both are the same if there is none: up to there, none
            can be, whatever follows.
        """
        while (first := self._first.search(text, start)) is not None:
            start = first.start()
            if not is_whole and self._may_begin(text, start):
                return start, start
            for length in self._lengths[text[start]]:
                found = text[start : start + length]  # shorter, where the text ends before
                if found in self.texts:
                    return start, start + len(found)
            start += 1
        return len(text), len(text)

    def _may_begin(self, text: str, start: int) -> bool:
        """Tell whether a tag, or a longer one than is there, would begin if more text followed."""
        if len(text) - start >= self._longest:
            return False
        tail = text[start:]
        index = bisect_left(self._sorted, tail)
        if index < len(self._sorted) and self._sorted[index] == tail:
            index += 1
        return index < len(self._sorted) and self._sorted[index].startswith(tail)


class TextStream:
    """Text that is fed in pieces and read by generators.

    Attributes:
        position: number of characters that were read.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._before = 0  # characters that were read and are not in the text any more
        self._is_whole = False
        self._kept: list[str] | None = None

    @property
    def position(self) -> int:
        return self._before + self._at

    @property
    def is_over(self) -> bool:
        """True if all has been read, and no more follows."""
        return self._is_whole and self._at == len(self._text)

    def feed(self, text: str) -> None:
        """Append text."""
        self._before += self._at
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Say that no more text follows."""
        self._is_whole = True

    def keep(self) -> None:
        """Keep what is read from here on, and nothing from before, for `unread`."""
        self._kept = []

    def stop_keeping(self) -> None:
        """Keep nothing."""
        self._kept = None

    def unread(self) -> int:
        """Go back to where `keep` was called, and keep no more.

        Returns:
            The position before.
        """
        position = self.position
        text = "".join(self._kept or ())
        self.back(text)
        self._kept = None
        return position

    def back(self, text: str) -> None:
        """Go back before a text that was read last."""
        if (missing := len(text) - self._at) > 0:
            self._text = text[:missing] + self._text
            self._before -= missing
            self._at = 0
        else:
            self._at -= len(text)
        if self._kept is not None:
            kept = "".join(self._kept)
            self._kept = [kept[: len(kept) - len(text)]]

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._kept is not None and text:
            self._kept.append(text)
        return text

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; empty at the end."""
        while self._at == len(self._text) and not self._is_whole:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> Reading[str]:
        """Read a character; empty at the end."""
        yield from self.peek()
        return self._take(min(self._at + 1, len(self._text)))

    def skip_space(self, put: Put = lambda text: None) -> Reading[str]:
        """Read white space, hand it to ``put``, and return the character after it without reading
        that."""
        yield from self.while_matching(_SPACE, put)
        return (yield from self.peek())

    def starts_with(self, text: str) -> Reading[bool]:
        """Read ``text`` if it is what follows; else nothing."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                self._take(self._at + len(text))
                return True
            if self._is_whole or not text.startswith(there):
                return False
            yield

    def expect(self, text: str) -> Reading[None]:
        """Read ``text``.

        Raises:
            MalformedCall: something else follows.
        """
        if not (yield from self.starts_with(text)):
            raise MalformedCall(f"{text!r} is missing")

    def is_at(self, tags: Tags) -> Reading[bool]:
        """Tell whether a tag follows."""
        while True:
            start, end = tags.find(self._text, self._at, self._is_whole)
            if end > start or start > self._at or self._is_whole:
                return end > start == self._at
            yield

    def up_to(self, tags: Tags, put: Put) -> Reading[str]:
        """Read up to and with a tag. Hand what is before it to ``put``, in pieces.

        Returns:
            The tag; empty at the end of the text.
        """
        while True:
            start, end = tags.find(self._text, self._at, self._is_whole)
            if start > self._at:
                put(self._take(start))
            if end > start:
                return self._take(end)
            if self._is_whole:
                return ""
            yield

    def while_matching(self, part: re.Pattern[str], put: Put) -> Reading[None]:
        """Read as long as ``part``, one or more characters of a class, matches."""
        while (yield from self.peek()):
            found = part.match(self._text, self._at)
            if found is None:
                return
            put(self._take(found.end()))

    def matching(self, part: re.Pattern[str]) -> Reading[str]:
        """Return the text that is read as long as ``part`` matches; see `while_matching`."""
        parts: list[str] = []
        yield from self.while_matching(part, parts.append)
        return "".join(parts)

    # -- JSON -------------------------------------------------------------------------------------

    def json_string(self) -> Reading[str]:
        """Read a string, and return what it says. Lone surrogates, which escapes may say, are no
        characters, and become U+FFFD.

        Raises:
            MalformedCall: it is none, or not closed.
        """
        parts: list[str] = []
        yield from self._json_string(parts.append)
        return clean_text(str(load_json("".join(parts))))

    def json_value(self, put: Put) -> Reading[None]:
        """Read a value, and hand its text to ``put`` in pieces.

        Strings and brackets are followed; whether all between them is JSON is left to `load_json`.

        Raises:
            MalformedCall: brackets do not match, or the text ends before the value does.
        """
        first = yield from self.peek()
        if first == '"':
            yield from self._json_string(put)
        elif first and first in "{[":
            yield from self._json_brackets(put)
        else:
            scalar = yield from self.matching(_SCALAR_PART)
            put(scalar)
            load_json(scalar)

    def _json_string(self, put: Put) -> Reading[None]:
        yield from self.expect('"')
        put('"')
        while True:
            yield from self.while_matching(_STRING_PART, put)
            character = yield from self.peek()
            if character == '"':
                put((yield from self.take()))
                return
            if character != "\\":
                raise MalformedCall("a string is not closed")
            put((yield from self._json_escape()))

    def _json_escape(self) -> Reading[str]:
        text = yield from self.take()
        allowed, missing = '"\\/bfnrtu', 1
        while missing:
            character = yield from self.peek()
            if not character or character not in allowed:
                raise MalformedCall("an escape of a string is wrong")
            text += yield from self.take()
            missing += 3 if character == "u" and len(text) == 2 else -1
            allowed = "0123456789abcdefABCDEF"
        return text

    def _json_brackets(self, put: Put) -> Reading[None]:
        closing: list[str] = []
        while True:
            character = yield from self.peek()
            if not character:
                raise MalformedCall("the text ends within it")
            if character == '"':
                yield from self._json_string(put)
            elif character in "{[":
                if len(closing) == MAX_DEPTH:
                    raise MalformedCall(f"it is nested more than {MAX_DEPTH} deep", "too_large")
                closing.append("}" if character == "{" else "]")
                put((yield from self.take()))
            elif character in "}]":
                if character != closing[-1]:
                    raise MalformedCall("its brackets do not match")
                closing.pop()
                put((yield from self.take()))
                if not closing:
                    return
            else:
                before = self.position
                yield from self.while_matching(_PLAIN_PART, put)
                if self.position == before:
                    raise MalformedCall(f"{character!r} is no part of JSON")


def load_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        MalformedCall: it is no JSON, or no finite number.
    """

    def refuse(name: str) -> None:
        raise MalformedCall(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"it is no JSON: {error}") from None
