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
    return MaskThread(load(), 70)


def late(row: int, bitmask, given: dict) -> LateMask:
    return LateMask(row, bitmask, lambda bits: given.__setitem__(row, bits))


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
    with masks.making([LateMask(0, lambda thing=thing: None, lambda bits: None)]):
        pass
    del thing
    gc.collect()
    assert known() is None


def test_the_thread_ends_with_its_owner():
    masks = MaskThread(load(), 70)
    with masks.making([LateMask(0, lambda: None, lambda bits: None)]):
        pass
    thread = masks._thread
    del masks
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
