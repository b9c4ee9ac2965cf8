"""Text that comes in pieces, broken between words where a terminal's line ends.

A terminal breaks lines anywhere. ``WordWrap`` holds a word back until it is known to be whole, and
begins a new line where it would not fit. Code blocks and tables stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

# What must not begin a line in text without spaces.
_NEVER_FIRST = frozenset(
    "。、，．：；！？）〕］｝」』】》〉・ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ"
)
_TAB = 8
_CODE_INDENT = "    "


class WordWrap:
    """Takes pieces, and gives what may be written now.

    Args:
        width: how many columns a line has; asked at the beginning of each, for windows change.
    """

    def __init__(self, width: Callable[[], int]):
        self._width_now = width
        self._width = width()
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._line = ""  # as it came, to know what it is
        self._is_fenced = False
        self._after_blank = True

    def feed(self, text: str) -> str:
        return "".join(map(self._take, text))

    def end(self) -> str:
        """Return the text that was held back: nothing more comes."""
        return self._end_word() + self._drop_spaces()

    def _take(self, char: str) -> str:
        if char == "\n":
            return self.end() + self._end_line()
        self._line += char
        if self._is_kept_as_it_is():
            return self.end() + self._write(char)
        if char in " \t":
            written = self._end_word()
            self._spaces += char
            return written
        if _columns(char) == 2 and char not in _NEVER_FIRST:
            written = self._end_word()  # a line may be broken before each of these
            self._word = char
            return written
        self._word += char
        if self._word and _columns(self._word) > self._width:
            return self._end_word()  # it fits in no line
        return ""

    def _end_line(self) -> str:
        stripped = self._line.strip()
        if stripped.startswith(("```", "~~~")):
            self._is_fenced = not self._is_fenced
        self._after_blank = not stripped
        self._line = ""
        self._column = 0
        self._width = self._width_now()
        return "\n"

    def _is_kept_as_it_is(self) -> bool:
        """Whether the line is of a code block, or of a table."""
        if self._is_fenced or self._line.startswith(("```", "~~~", "|")):
            return True
        return self._after_blank and self._line.startswith((_CODE_INDENT, "\t"))

    def _end_word(self) -> str:
        if not self._word:
            return ""
        word, self._word = self._word, ""
        spaces, self._spaces = self._spaces, ""
        if self._column and self._column + _columns(spaces) + _columns(word) > self._width:
            self._column, self._width = 0, self._width_now()
            return "\n" + self._write(word)
        return self._write(spaces) + self._write(word)

    def _drop_spaces(self) -> str:
        """Spaces at the end of a line: of the indentation of one that begins with them, kept."""
        spaces, self._spaces = self._spaces, ""
        return self._write(spaces)

    def _write(self, text: str) -> str:
        for char in text:
            self._column += _TAB - self._column % _TAB if char == "\t" else _columns(char)
        if self._column > self._width:  # the terminal has gone on in another line
            self._column %= self._width
        return text


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
