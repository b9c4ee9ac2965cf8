"""Regular expressions from foreign files, matched without backtracking.

A checkpoint's config names modules by patterns, and its author may have chosen one for which
Python's ``re`` takes forever, such as ``(a+)+$``. Here a pattern becomes a nondeterministic
automaton, which is run over all of its states at once: a text of n characters takes at most n steps
over them, whatever the pattern, or, with lookahead, n for each of its positions (K. Thompson,
"Regular Expression Search Algorithm", 1968). Sets of states that occurred are kept, as the states
of a deterministic automaton.

The syntax is that of ``re``: literals, ``.``, classes, groups, ``|``, ``* + ? {m,n}``, ``^ $``,
``\\A \\Z \\b \\B``, lookahead and ``(?i)``. Lazy quantifiers find the same, as only whether a text
matches is asked. Constructs that no automaton can match, or that no config needs, are refused:
references to groups, lookbehind, atomic groups, other flags. ``$`` is the end of the text alone,
and not the place before a last newline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

MAX_LENGTH = 1000  # characters of a pattern
MAX_STATES = 2000  # states of its automaton; {m,n} repeats the states before it
MAX_DEPTH = 40  # nested groups
MAX_TEXT = 512  # characters of a text: names of modules have far fewer
MAX_PATTERNS = 2000  # patterns of one file
MAX_STATES_OF_ALL = 50_000  # states of all of them
_MAX_KEPT = 1000  # sets of states

_Test = Callable[[str], bool]  # test of a character
_CATEGORIES: dict[str, _Test] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": lambda char: char.isalnum() or char == "_",
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_HEX_DIGITS = {"x": 2, "u": 4}


class PatternError(ValueError):
    """A pattern is wrong, too large, or uses unsupported syntax. The text says which."""


class Pattern:
    """A regular expression. PatternError if it is invalid or refused."""

    def __init__(self, source: str):
        if len(source) > MAX_LENGTH:
            raise PatternError(f"it has {len(source)} characters: {MAX_LENGTH} are the most")
        self.source = source
        self._automaton = _Parser(source).automaton()

    def match(self, text: str) -> bool:
        """Return whether some beginning of ``text`` matches, as with ``re.match``."""
        return self._automaton.matches(_checked(text), 0)

    def search(self, text: str) -> bool:
        """Return whether some part of ``text`` matches, as with ``re.search``."""
        return self._automaton.matches(_checked(text), 0, anywhere=True)

    def fullmatch(self, text: str) -> bool:
        """Return whether the whole of ``text`` matches."""
        return self._automaton.matches(_checked(text), 0, whole=True)

    @property
    def num_states(self) -> int:
        return len(self._automaton.nexts)


class PatternCompiler:
    """Compiles the patterns of one file, and bounds their total size."""

    def __init__(self) -> None:
        self._num_patterns = 0
        self._num_states = 0

    def compile(self, source: str) -> Pattern:
        """Return a pattern; PatternError as for ``Pattern``, and if the file has too many or too
        large ones."""
        if self._num_patterns >= MAX_PATTERNS:
            raise PatternError(f"the file has more than {MAX_PATTERNS} patterns")
        pattern = Pattern(source)
        self._num_patterns += 1
        self._num_states += pattern.num_states
        if self._num_states > MAX_STATES_OF_ALL:
            raise PatternError(
                f"all patterns of the file need more than {MAX_STATES_OF_ALL} states"
            )
        return pattern


def _checked(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise PatternError(f"a text of {len(text)} characters: {MAX_TEXT} are the most")
    return text


# -- the automaton -----------------------------------------------------------------------------

# Whether a place of a text may be passed. It must depend on these two alone.
_Assertion = Callable[[str, int], bool]
_States = frozenset[int]


@dataclass(slots=True)
class _Automaton:
    """States, each of which consumes a character that its test allows and goes on to the next
    numbers of ``nexts``, or passes on at once, past an assertion if it has one."""

    tests: list[_Test | None] = field(default_factory=list)
    assertions: list[_Assertion | None] = field(default_factory=list)
    nexts: list[list[int]] = field(default_factory=list)
    start: int = 0
    end: int = 0
    _kept: dict[tuple[_States, str], _States] = field(default_factory=dict)

    def add(self, test: _Test | None = None, assertion: _Assertion | None = None) -> int:
        if len(self.nexts) >= MAX_STATES:
            raise PatternError(f"it needs more than {MAX_STATES} states: repeat less by {{m,n}}")
        self.tests.append(test)
        self.assertions.append(assertion)
        self.nexts.append([])
        return len(self.nexts) - 1

    def matches(self, text: str, at: int, *, anywhere: bool = False, whole: bool = False) -> bool:
        """Return whether a match begins at ``at``, or, with ``anywhere``, behind it; ``whole``:
        it has to end at the text's end."""
        asserts = any(self.assertions)
        current = self._closure([self.start], text, at)
        while True:
            if self.end in current and (not whole or at == len(text)):
                return True
            if at == len(text) or not (current or anywhere):
                return False
            char, at = text[at], at + 1
            if asserts or anywhere:
                reached = [*self._reached(current, char), *([self.start] if anywhere else ())]
                current = self._closure(reached, text, at)
            else:
                current = self._after(current, char)

    def _after(self, current: _States, char: str) -> _States:
        """Return the states behind a character, where no assertion depends on the rest of the
        text."""
        key = current, char
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            found = self._kept[key] = self._closure(self._reached(current, char), "", 0)
        return found

    def _reached(self, current: _States, char: str) -> Iterator[int]:
        for state in current:
            test = self.tests[state]
            if test is not None and test(char):
                yield from self.nexts[state]

    def _closure(self, states: Iterable[int], text: str, at: int) -> _States:
        """Return these states, and those that are reached from them without a character."""
        found: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state in found:
                continue
            found.add(state)
            assertion = self.assertions[state]
            if self.tests[state] is None and (assertion is None or assertion(text, at)):
                waiting += self.nexts[state]
        return frozenset(found)


def _is_word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and _CATEGORIES["w"](text[at])


def _at_boundary(text: str, at: int) -> bool:
    return _is_word(text, at - 1) != _is_word(text, at)


_PLACES: dict[str, _Assertion] = {
    "^": lambda text, at: at == 0,
    "$": lambda text, at: at == len(text),
    "A": lambda text, at: at == 0,
    "Z": lambda text, at: at == len(text),
    "b": _at_boundary,
    "B": lambda text, at: not _at_boundary(text, at),
}


def _looking_ahead(ahead: _Automaton, negative: bool) -> _Assertion:
    """Return a test of whether the text ahead matches, or, ``negative``, does not. Each place of
    a text is tested once, as several states ask."""
    known: dict[tuple[str, int], bool] = {}

    def looks(text: str, at: int) -> bool:
        if len(known) > 2 * MAX_TEXT:
            known.clear()
        if (text, at) not in known:
            known[text, at] = ahead.matches(text, at) != negative
        return known[text, at]

    return looks


# -- the syntax --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of an automaton, from its state ``first`` to ``last``, which leads on to nothing
    yet."""

    first: int
    last: int


class _Parser:
    """Reads a pattern from left to right, and builds its automaton on the way."""

    def __init__(self, source: str):
        self._source, self._at, self._depth = source, 0, 0
        self._looks_ahead = False
        self._ignores_case = source.startswith("(?i)")
        if self._ignores_case:
            self._at = len("(?i)")
        self._made = _Automaton()

    def automaton(self) -> _Automaton:
        piece = self._alternatives()
        if self._at < len(self._source):
            raise self._wrong("a ) closes no group")
        self._made.start, self._made.end = piece.first, piece.last
        return self._made

    def _wrong(self, what: str) -> PatternError:
        return PatternError(f"at character {self._at + 1}: {what}")

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if self._source.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _next(self, what: str) -> str:
        if self._at == len(self._source):
            raise self._wrong(f"{what} is missing")
        self._at += 1
        return self._source[self._at - 1]

    # Pieces are built once for each time that a quantifier repeats them: what is read again is the
    # pattern's own text.

    def _alternatives(self) -> _Piece:
        made = self._made
        first, last = made.add(), made.add()
        while True:
            piece = self._sequence()
            made.nexts[first].append(piece.first)
            made.nexts[piece.last].append(last)
            if not self._take("|"):
                return _Piece(first, last)

    def _sequence(self) -> _Piece:
        first = last = self._made.add()
        while self._peek() not in ("", "|", ")"):
            piece = self._repeated()
            self._made.nexts[last].append(piece.first)
            last = piece.last
        return _Piece(first, last)

    def _repeated(self) -> _Piece:
        begin = self._at
        piece = self._atom()
        behind = self._at
        bounds = self._quantifier()
        if bounds is None:
            return piece
        least, most = bounds
        end = self._at
        if self._peek() in ("*", "+", "?") or self._quantifier() is not None:
            self._at = end
            raise self._wrong("a quantifier stands behind another")
        made = self._made
        first = last = made.add()
        skips = []  # behind which all further ones may be left out
        copies = max(least, 1) if most is None else most
        for number in range(copies):
            if number > 0:
                self._at = begin
                piece = self._atom()
            if number >= least:
                skips.append(last)
            made.nexts[last].append(piece.first)
            last = piece.last
        self._at = end
        left = made.add()
        if most is None:
            made.nexts[last].append(piece.first)
        if least == 0 and copies == 0:
            skips.append(first)
        for skip in (*skips, last):
            made.nexts[skip].append(left)
        assert behind <= end
        return _Piece(first, left)

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Return the least and the largest number of repetitions (None: unbounded); None without
        a quantifier."""
        bounds = _QUANTIFIERS.get(self._peek())
        if bounds is not None:
            self._at += 1
        else:
            bounds = self._counts()
        if bounds is None:
            return None
        if self._take("+"):
            raise self._wrong("possessive quantifiers are not supported")
        self._take("?")  # a lazy quantifier finds the same
        return bounds

    def _counts(self) -> tuple[int, int | None] | None:
        """Return the counts of {m}, {m,}, {,n} and {m,n}; any other brace is a literal."""
        close = self._source.find("}", self._at)
        if self._peek() != "{" or close < 0:
            return None
        least, comma, most = self._source[self._at + 1 : close].partition(",")
        digits = (least + most).isascii() and (least + most).isdecimal()
        if not (digits or (comma and not least + most)) or len(least + most) > 8:
            return None
        if not comma:
            most = least
        bounds = int(least or 0), int(most) if most else None
        self._at = close + 1
        if bounds[1] is not None and bounds[1] < bounds[0]:
            raise self._wrong("{m,n} with m above n")
        if max(bounds[0], bounds[1] or 0) > MAX_STATES:
            raise self._wrong(f"{MAX_STATES} repetitions are the most")
        return bounds

    def _atom(self) -> _Piece:
        char = self._next("something to match")
        if char == "(":
            return self._group()
        if char in "^$":
            return self._single(assertion=_PLACES[char])
        if char == "[":
            return self._single(self._class())
        if char == ".":
            return self._single(lambda each: each != "\n")
        if char in "*+?":
            self._at -= 1
            raise self._wrong(f"{char} has nothing to repeat")
        if char == "\\":
            return self._escape()
        return self._single(self._literal(char))

    def _single(self, test: _Test | None = None, assertion: _Assertion | None = None) -> _Piece:
        first, last = self._made.add(test, assertion), self._made.add()
        self._made.nexts[first].append(last)
        return _Piece(first, last)

    def _group(self) -> _Piece:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"groups are {MAX_DEPTH} deep at most")
        if self._take("?=") or self._take("?!"):
            piece = self._lookahead(negative=self._source[self._at - 1] == "!")
        else:
            self._skip_name()
            piece = self._alternatives()
        if not self._take(")"):
            raise self._wrong("a group has no )")
        self._depth -= 1
        return piece

    def _lookahead(self, negative: bool) -> _Piece:
        if self._looks_ahead:  # for each place of a text that one passes, the other would do so too
            raise self._wrong("a lookahead within another is not supported")
        self._looks_ahead = True
        around, self._made = self._made, _Automaton()
        inner = self._alternatives()
        ahead, self._made = self._made, around
        self._looks_ahead = False
        ahead.start, ahead.end = inner.first, inner.last
        for _ in ahead.nexts:  # its states count among those of the whole
            self._made.add()
        return self._single(assertion=_looking_ahead(ahead, negative))

    def _skip_name(self) -> None:
        if not self._take("?"):
            return
        if self._take(":"):
            return
        if self._take("P<"):
            name, close, _ = self._source[self._at :].partition(">")
            if close and name.isidentifier():
                self._at += len(name) + 1
                return
        raise self._wrong(
            "only groups, (?:…), (?P<name>…), lookahead and a leading (?i) are supported"
        )

    def _escape(self) -> _Piece:
        char = self._next("what follows a \\")
        if char in "AZbB":
            return self._single(assertion=_PLACES[char])
        if char in "123456789":
            raise self._wrong("references to groups are not supported")
        test = self._category(char)
        return self._single(test or self._literal(self._escaped(char)))

    @staticmethod
    def _category(char: str) -> _Test | None:
        of = _CATEGORIES.get(char.lower())
        if of is None:
            return None
        return of if char.islower() else lambda each: not of(each)

    def _escaped(self, char: str) -> str:
        """Return the character that an escape stands for."""
        if char in _CONTROLS:
            return _CONTROLS[char]
        if (length := _HEX_DIGITS.get(char)) is not None:
            digits = self._source[self._at : self._at + length]
            if len(digits) == length and all(each in "0123456789abcdefABCDEF" for each in digits):
                self._at += length
                return chr(int(digits, 16))
            raise self._wrong(f"\\{char} needs {length} hexadecimal digits")
        if char.isascii() and char.isalnum():
            raise self._wrong(f"\\{char} is not supported")
        return char

    def _literal(self, char: str) -> _Test:
        if not self._ignores_case:
            return char.__eq__
        forms = {char, char.lower(), char.upper()}
        return forms.__contains__

    def _class(self) -> _Test:
        """Return the test of [...], read behind its first bracket."""
        is_negated = self._take("^")
        tests: list[_Test] = []
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            tests.append(self._class_item())
        self._at += 1

        def test(char: str) -> bool:
            forms = {char, char.lower(), char.upper()} if self._ignores_case else (char,)
            return any(each(form) for each in tests for form in forms) != is_negated

        return test

    def _class_item(self) -> _Test:
        """Return a category, a character or a range of them."""
        low = self._next("the ] of a class")
        if low == "\\":
            char = self._next("what follows a \\")
            if category := self._category(char):
                return category
            low = "\b" if char == "b" else self._escaped(char)
        if self._peek() != "-" or self._source[self._at + 1 : self._at + 2] in ("", "]"):
            return low.__eq__
        self._at += 1
        high = self._next("the end of a range")
        if high == "\\":
            char = self._next("what follows a \\")
            if self._category(char):
                raise self._wrong("a range ends in no single character")
            high = "\b" if char == "b" else self._escaped(char)
        if high < low:
            raise self._wrong("a range ends before it begins")
        return lambda char: low <= char <= high
