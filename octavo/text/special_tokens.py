"""Special tokens in text, finding them and keeping users' text from becoming one.

``TokenMatcher`` finds the texts of tokens, ``SpecialTokens`` cuts a text at them, and ``Disguise``
changes a user's text so that no special token can begin in it, and changes it back later.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_PRIVATE = re.compile("[\U000f0000-\U000fffff]")


# Tokens that end a turn. Models emit them whether or not their files call them EOS.
END_OF_TURN = (
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",
    "<|eot|>",  # Llama 4
    "<|eom|>",
    "<|im_end|>",  # ChatML
    "<end_of_turn>",  # Gemma
    "<turn|>",
    "<|end|>",  # Phi
    "<|end_of_turn|>",
    "<|return|>",  # gpt-oss
    "<|call|>",
)


def end_of_turn_ids(special_tokens: Mapping[str, int]) -> set[int]:
    """Return the ids of the tokens that end a turn, of special tokens by text."""
    ids = {special_tokens[text] for text in END_OF_TURN if text in special_tokens}
    if {"<|return|>", "<|call|>"} <= special_tokens.keys():
        ids.discard(special_tokens.get("<|end|>", -1))  # there it ends a message, not the turn
    return ids


class TokenMatcher:
    """Finds the texts of ``tokens`` (text -> id): the leftmost first, of those the longest.

    Thousands of tokens often share their first characters (``<unused0>`` ... ``<unused6241>``), so
    a regular expression finds the first two and a dictionary decides.
    """

    def __init__(self, tokens: Mapping[str, int]):
        self.ids = {text: token_id for text, token_id in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self.ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        heads = sorted(self._lengths, key=len, reverse=True)
        self._head = re.compile("|".join(map(re.escape, heads)) or "(?!)")

    def match(self, text: str, start: int) -> int:
        """Return the end of the longest token that begins at ``start``; ``start`` itself if none
        does."""
        for head in (text[start : start + 2], text[start : start + 1]):
            for length in self._lengths.get(head, ()):
                found = text[start : start + length]  # shorter, where the text ends before
                if found in self.ids:
                    return start + len(found)
        return start

    def finditer(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield ``(start, end, token_id)`` of every match, without overlaps, left to right."""
        position = 0
        while (head := self._head.search(text, position)) is not None:
            start = head.start()
            end = self.match(text, start)
            if end > start:
                yield start, end, self.ids[text[start:end]]
            position = max(end, start + 1)


class SpecialTokens:
    """The special tokens of a vocabulary.

    ``strip_left`` and ``strip_right`` are the ids of tokens that remove the white space before and
    after them (``lstrip`` and ``rstrip`` of tokenizer.json).
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        strip_left: Collection[int] = (),
        strip_right: Collection[int] = (),
    ):
        self.matcher = TokenMatcher(tokens)
        self.ids = frozenset(tokens.values())
        self._strip_left = frozenset(strip_left)
        self.strip_right = frozenset(strip_right)
        # White space never is disguised: templates trim it.
        self._sorted = sorted(text for text in self.matcher.ids if not text[0].isspace())
        self._longest = max(map(len, self._sorted), default=0)
        self.first_characters = sorted({text[0] for text in self._sorted})
        alternatives = "".join(map(re.escape, self.first_characters))
        self.first = re.compile(f"[{alternatives}]" if alternatives else "(?!)")

    def may_begin(self, text: str, start: int) -> bool:
        """True if a special token begins at ``start``, or would if more text followed."""
        if self.matcher.match(text, start) > start:
            return True
        tail = text[start : start + self._longest]
        index = bisect_left(self._sorted, tail)
        ends_text = start + len(tail) == len(text)
        return ends_text and index < len(self._sorted) and self._sorted[index].startswith(tail)

    def split(self, text: str) -> list[str | int]:
        """Cut ``text`` into plain text and the ids of the special tokens in it."""
        pieces: list[str | int] = []
        done = 0
        for start, end, token_id in self.matcher.finditer(text):
            if start < done:
                continue
            plain = text[done:start]
            if token_id in self._strip_left:
                plain = plain.rstrip()
            if plain:
                pieces.append(plain)
            pieces.append(token_id)
            done = end
            if token_id in self.strip_right:
                while done < len(text) and text[done].isspace():
                    done += 1
        if done < len(text):
            pieces.append(text[done:])
        return pieces


class Disguise:
    """Hides in a user's text every character at which a special token could begin.

    Such a character is replaced by a private-use character that occurs nowhere in ``used``, one
    for one, so lengths stay the same and ``reveal`` undoes it. A character is left alone where the
    template may be looking for it (inside one of its ``literals``, as in ``'</think>' in content``)
    unless a whole special token begins there, or the beginning of one ends the text: a template
    may put two texts side by side.
    """

    def __init__(self, specials: SpecialTokens, literals: Iterable[str], used: Iterable[str]):
        self._specials = specials
        taken = {character for text in used for character in _PRIVATE.findall(text)}
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
        self.tag = next(free)  # one more character that occurs nowhere, to mark places with
        self._cover = dict(zip(specials.first_characters, free, strict=False))
        self._literals = [
            literal
            for literal in literals
            if specials.first.search(literal) and literal not in specials.matcher.ids
        ]

    def hide(self, text: str) -> str:
        found = [match.start() for match in self._specials.first.finditer(text)]
        if not found:
            return text
        kept = self._literal_positions(text)
        characters = list(text)
        for start in found:
            character = text[start]
            suspicious = start not in kept and not character.isalnum()
            if suspicious or self._specials.may_begin(text, start):
                characters[start] = self._cover[character]
        return "".join(characters)

    def reveal(self, text: str) -> str:
        for character, cover in self._cover.items():
            if cover in text:
                text = text.replace(cover, character)
        return text

    def _literal_positions(self, text: str) -> set[int]:
        positions: set[int] = set()
        for literal in self._literals:
            start = text.find(literal)
            while start >= 0:
                positions.update(range(start, start + len(literal)))
                start = text.find(literal, start + len(literal))
        return positions
