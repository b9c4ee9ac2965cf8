"""Bounds the work, memory and output of one rendering of a chat template.

A chat template is a program that came with a model file. It cannot reach anything outside (see
``chat_sandbox``), but it could run for ever, or grow a string without end, inside single
operations that nothing can interrupt. So every operation first says here what it will cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2.runtime import Context, Undefined

from octavo.base.errors import ChatTemplateError

MAX_SECONDS = 1.0  # of CPU time of the rendering thread
MAX_STEPS = 20_000_000  # of a tenth of a microsecond or less each
MAX_OUTPUT_BYTES = 4 << 20
MAX_TEXT = 4 << 20  # characters of any single string
MAX_ALLOCATED = 32 << 20  # characters' worth of everything made while rendering, 4 bytes each
MAX_ITEMS = 1 << 20  # of any single list
MAX_RANGE = 100_000  # what Jinja's own sandbox allows
MAX_DEPTH = 100  # of nested data, and of macros calling macros
MAX_INT_BITS = 4096

_STEPS_BETWEEN_CHECKS = 4096
_CHARACTERS_PER_STEP = 64  # scanning 64 characters costs about as much as one step
_PLAIN_SCALARS = (str, int, float, bool, type(None))
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_SEQUENCES: tuple[type[Any], ...] = (list, tuple, range, *_VIEWS)


class Budget:
    """Counts what one rendering does; raises ChatTemplateError when it has done too much."""

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        self._clock = clock
        self._deadline = clock() + MAX_SECONDS
        self._steps = 0
        self._next_check = _STEPS_BETWEEN_CHECKS
        self._allocated = 0
        self._depth = 0

    def work(self, steps: int = 1) -> None:
        """Pays for ``steps`` small operations, before they begin if nothing can interrupt them."""
        self._steps += steps
        if self._steps >= self._next_check:
            self._next_check = self._steps + _STEPS_BETWEEN_CHECKS
            if self._steps > MAX_STEPS:
                raise ChatTemplateError("the chat template does too much work")
            if self._clock() > self._deadline:
                raise ChatTemplateError(f"the chat template ran for more than {MAX_SECONDS:g} s")

    def scan(self, *texts: object) -> None:
        """Pays for going through strings once."""
        length = sum(len(text) for text in texts if isinstance(text, str))
        self.work(1 + length // _CHARACTERS_PER_STEP)

    def allocate(self, characters: int) -> None:
        """Pays for making a string of so many characters; ask before making it."""
        if characters > MAX_TEXT:
            raise ChatTemplateError(
                f"the chat template makes a text of {characters:,} characters; "
                f"{MAX_TEXT:,} are allowed"
            )
        self._allocate(characters)

    def allocate_items(self, count: int, *, new: bool = False) -> None:
        """Pays for a list, tuple or dict of ``count`` items; ``new``: and for the items."""
        if count > MAX_ITEMS:
            raise ChatTemplateError(
                f"the chat template makes a list of {count:,} items; {MAX_ITEMS:,} are allowed"
            )
        self._allocate(16 + count * (16 if new else 2))

    def _allocate(self, characters: int) -> None:
        assert characters >= 0, "a payment cannot be negative"
        self.work(1 + characters // _CHARACTERS_PER_STEP)
        self._allocated += characters
        if self._allocated > MAX_ALLOCATED:
            raise ChatTemplateError("the chat template uses too much memory")

    def enter(self) -> None:
        """Goes one macro or recursive loop deeper; pair with ``leave``."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ChatTemplateError(f"the chat template nests more than {MAX_DEPTH} calls")

    def leave(self) -> None:
        self._depth -= 1

    def iterate(self, values: Iterable[Any]) -> Iterator[Any]:
        """Iterates, paying for each item and for looking at it once."""
        for value in values:
            self.scan(value)
            yield value

    def collect(self, values: Iterable[Any]) -> list[Any]:
        """A list of the values, paid for as it grows."""
        items: list[Any] = []
        for value in self.iterate(values):
            if len(items) % 256 == 0:
                self.allocate_items(256, new=True)
            items.append(value)
        self.allocate_items(len(items))
        return items

    def measure(self, value: Any, *, to_print: bool = False, indent: int = 0) -> int:
        """Return about how many characters printing ``value`` takes, and pay for a walk through it.

        Data that contains the same list twice on every level is a tree of exponential size to
        everything that walks through it: comparing, hashing, printing. Data that is accepted here
        can be walked. With ``to_print``, only plain data is accepted.
        """
        if isinstance(value, str):
            self.scan(value)
            return len(value)
        characters = 0
        pending: list[Iterator[Any]] = [iter([value])]
        while pending:
            for item in pending[-1]:
                self.work()
                characters += 4 + indent * len(pending)
                if isinstance(item, str):
                    self.scan(item)
                    characters += len(item)
                elif isinstance(item, dict):
                    pending.append(iter([part for pair in item.items() for part in pair]))
                    break
                elif isinstance(item, _SEQUENCES):
                    pending.append(iter(item))
                    break
                elif isinstance(item, (int, float)):
                    characters += 20 + (item.bit_length() // 3 if isinstance(item, int) else 0)
                elif to_print and item is not None and not isinstance(item, Undefined):
                    raise ChatTemplateError(
                        f"the chat template prints a {type(item).__name__}; "
                        "only text, numbers, lists and dicts can be printed"
                    )
            else:
                pending.pop()
            if len(pending) > MAX_DEPTH:
                raise ChatTemplateError(f"data nested more than {MAX_DEPTH} levels deep")
            if characters > MAX_TEXT and to_print:
                self.allocate(characters)
        return characters

    def text(self, value: object) -> str:
        """``str(value)`` of plain data."""
        if isinstance(value, str):
            return value
        self.allocate(self.measure(value, to_print=True))
        return str(value)


def is_scalar(value: object) -> bool:
    """Whether comparing and hashing ``value`` costs next to nothing."""
    return isinstance(value, _PLAIN_SCALARS)


class ChatContext(Context):
    """The variables of one rendering, and its budget."""

    budget: Budget
