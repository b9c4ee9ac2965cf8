"""Masks are made in another thread, in their order, and counted when they are there."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest

from octavo.kernels.cpu.library import load
from octavo.runtime.mask_thread import LateMask, MaskThread


@pytest.fixture
def masks() -> MaskThread:
    return MaskThread(load(), 70, has_core=True)


class Masked:
    """A row with parts, which notes those that are made together."""

    def __init__(self, bitmask, seconds: float = 1.0, parts=()):
        self.bitmask, self.mask_seconds, self.parts = bitmask, seconds, parts

    def mask_parts(self):
        return self.parts


def late(row: int, bitmask, given: dict, **settings) -> LateMask:
    return LateMask(row, Masked(bitmask, **settings), lambda bits: given.__setitem__(row, bits))


def test_masks_are_there_at_the_end_of_the_block(masks):
    given: dict = {}
    for number in range(50):
        bits = {row: (number, row) for row in (0, 3)}
        with masks.making([late(row, partial(bits.get, row), given) for row in bits]):
            pass
        assert given == {0: (number, 0), 3: (number, 3)} and masks.problems == {}


def test_they_are_made_in_another_thread_while_the_block_runs(masks):
    given: dict = {}
    may_go_on = threading.Event()

    def bitmask():
        assert may_go_on.wait(60)
        return threading.current_thread().name

    with masks.making([late(0, bitmask, given)]):
        assert given == {}
        may_go_on.set()
    assert given == {0: "octavo-masks"}


@pytest.mark.parametrize(("has_core", "seconds"), [(False, 1.0), (True, 1e-6)])
def test_without_a_core_of_their_own_or_when_quick_they_are_made_before_the_block(
    has_core, seconds
):
    given: dict = {}
    rows = [late(row, lambda: threading.current_thread(), given, seconds=seconds) for row in (1, 2)]
    with MaskThread(load(), 70, has_core=has_core).making(rows):
        assert given == dict.fromkeys((1, 2), threading.current_thread())


@pytest.mark.parametrize("has_core", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_parts_of_several_rows_are_made_together_before_any_is_given(has_core, fails):
    given: dict = {}
    made = []

    class Part:
        def make_together(self, parts):
            made.append((parts, dict(given)))
            if fails:
                raise RuntimeError("no part of any row's problem")

    first, second, third = Part(), Part(), Part()
    rows = [
        late(0, lambda: "a", given, parts=[first, second]),
        late(1, lambda: "b", given),
        late(2, lambda: "c", given, parts=[third]),
    ]
    masks = MaskThread(load(), 70, has_core=has_core)
    with masks.making(rows):
        pass
    assert made == [([first, second, third], {})]
    assert given == {0: "a", 1: "b", 2: "c"} and masks.problems == {}


def test_a_fault_leaves_no_token_and_is_told(masks):
    given: dict = {}

    def fault():
        raise RuntimeError("a fault")

    with masks.making([late(2, fault, given), late(4, lambda: None, given)]):
        pass
    assert list(given[2]) == [0, 0, 0] and given[4] is None
    assert list(masks.problems) == [2] and "a fault" in masks.problems[2]
    with masks.making([]):
        pass
    assert masks.problems == {}


def test_a_step_that_was_interrupted_disturbs_no_later_one(masks):
    given: dict = {}
    with pytest.raises(KeyboardInterrupt), masks.making([late(0, lambda: "old", given)]):
        raise KeyboardInterrupt
    with masks.making([late(0, lambda: "new", given)]):
        pass
    assert given == {0: "new"}


def test_nothing_is_kept_alive(masks):
    class Thing:
        pass

    thing = Thing()
    known = weakref.ref(thing)
    with masks.making([late(0, lambda thing=thing: None, {})]):
        pass
    del thing
    gc.collect()
    assert known() is None


def test_the_thread_ends_with_its_owner():
    masks = MaskThread(load(), 70, has_core=True)
    with masks.making([late(0, lambda: None, {})]):
        pass
    thread = masks._thread
    del masks
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
