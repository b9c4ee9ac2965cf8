"""`MaskThread`, which makes the masks of a step's rows while its forward pass runs.

    engine's thread   write the step │ one native call: layers, head, ........ sample │ take tokens
    this thread                      │ masks of rows 0, 3, 4 ... ──(counter)──▶ ▲
                                                            a row waits for its own mask

The native call holds no lock of the interpreter, and neither do the libraries that follow grammars;
so the two overlap. A worker that comes to a masked row waits until the counter has reached the
row's turn (csrc/counter.h), which it mostly has.

Where the native call has all cores, another thread could only take one from it, for which the
others would wait. There the masks are made before the call, by all of them at once; and so is a
mask that takes less time than waking a thread.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

from octavo.base.errors import EngineError
from octavo.core.token_mask import Bits
from octavo.kernels.cpu.library import Library
from octavo.runtime.sampling_row import MaskedRow, make_together

_log = logging.getLogger("octavo")

_WAKING_SECONDS = 100e-6  # until another thread runs, and its core's cache has what it had


class LateMask(NamedTuple):
    """A mask that is made while the step runs, or before it.

    Args:
        row: of the step's samples.
        of: makes it.
        give: called with the bits, before the counter says that they are there.
    """

    row: int
    of: MaskedRow
    give: Callable[[Bits | None], None]


class _Work(NamedTuple):
    number: int  # of the step
    masks: Sequence[LateMask]
    problems: dict[int, str]


_Works: TypeAlias = "SimpleQueue[_Work | None]"
_Numbers: TypeAlias = "SimpleQueue[int]"


class MaskThread:
    """A thread that makes masks in their order, and a counter of those that are made.

    The thread starts with the first mask. One that cannot be made allows no token, which ends its
    request alone; ``problems`` has the reason by the row.

    Args:
        has_core: there are more cores than the step's native call uses.
    """

    def __init__(self, library: Library, vocab_size: int, *, has_core: bool):
        self._has_core = has_core
        self._nothing = array("I", bytes(4 * -(-vocab_size // 32)))
        lib = library.lib
        counter = lib.oct_counter_new()
        if not counter:
            raise EngineError("no memory for a counter of masks")
        self.counter = ctypes.c_void_p(counter)
        self._reset = lib.oct_counter_reset
        self._count = partial(lib.oct_counter_add, self.counter, 1)
        weakref.finalize(self, lib.oct_counter_free, self.counter)
        self._thread: threading.Thread | None = None
        self._works: _Works = SimpleQueue()
        self._ended: _Numbers = SimpleQueue()
        self._number = self._num_ended = 0
        self.problems: dict[int, str] = {}

    @contextmanager
    def making(self, masks: Sequence[LateMask]) -> Iterator[None]:
        """Make masks inside of the ``with`` block, at whose end they are all made."""
        self.problems = {}
        if not masks:
            yield
            return
        self._wait()  # after an interruption there may be an earlier step's
        if not self._has_core or sum(mask.of.mask_seconds for mask in masks) < _WAKING_SECONDS:
            self._reset(self.counter)
            _make_masks(masks, self.problems, self._count, self._nothing)
            yield
            return
        if self._thread is None or not self._thread.is_alive():  # a forked process has none
            self._start()
        self._reset(self.counter)
        self._number += 1
        self._works.put(_Work(self._number, masks, self.problems))
        try:
            yield
        finally:
            self._wait()

    def _start(self) -> None:
        self._works, self._ended, self._num_ended = SimpleQueue(), SimpleQueue(), self._number
        self._thread = threading.Thread(
            target=_work_off,
            args=(self._works, self._ended, self._count, self._nothing),
            name="octavo-masks",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._works.put, None)

    def _wait(self) -> None:
        thread = self._thread
        while thread is not None and thread.is_alive() and self._num_ended < self._number:
            with suppress(Empty):
                self._num_ended = self._ended.get(timeout=1.0)


def _work_off(works: _Works, ended: _Numbers, count: Callable[[], None], nothing: Bits) -> None:
    while (work := works.get()) is not None:
        _make_masks(work.masks, work.problems, count, nothing)
        number = work.number
        del work  # requests end
        ended.put(number)


def _make_masks(
    masks: Sequence[LateMask], problems: dict[int, str], count: Callable[[], None], nothing: Bits
) -> None:
    if len(masks) > 1:
        make_together(mask.of for mask in masks)
    for mask in masks:
        try:
            _make_mask(mask, problems, nothing)
        finally:  # the step waits for it
            count()


def _make_mask(mask: LateMask, problems: dict[int, str], nothing: Bits) -> None:
    try:
        mask.give(mask.of.bitmask())
    except BaseException as error:
        problems[mask.row] = f"the mask of its tokens failed: {type(error).__name__}: {error}"
        _log.exception("the mask of a request failed")
        mask.give(nothing)
