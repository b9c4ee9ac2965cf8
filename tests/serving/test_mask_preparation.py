"""Whose mask is made when: what is known at once, what is quick before what is not."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

import pytest

from octavo.base.errors import ConstraintError, QueueFullError
from octavo.core.sampling_params import SamplingParams
from octavo.serving.mask_preparation import MaskPreparation
from octavo.serving.text_engine import PreparedMask

MASK = PreparedMask(None)


class Grammars:
    """A compiler of which the test says what it knows; its trials end when the test says so."""

    def __init__(self):
        self.trials: dict[str, Future] = {}
        self.compiled: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.tenants: list[str] = []
        self.error: Exception | None = None
        self.asked = queue.SimpleQueue()

    def is_compiled(self, asked):
        return asked.regex in self.compiled

    def seconds_to_compile(self, asked):
        return self.seconds.get(asked.regex, 0.0)

    def try_out(self, asked, tenant):
        self.tenants.append(tenant)
        self.asked.put(asked.regex)
        if self.error is not None:
            raise self.error
        return self.trials.get(asked.regex)


class Masks:
    """Asks for masks, and waits for them."""

    def __init__(self):
        self.grammars = Grammars()
        self.preparation = MaskPreparation(self.grammars)
        self.ended = queue.SimpleQueue()

    def ask(self, regex, prepare=lambda: MASK, tenant=""):
        params = SamplingParams(structured_outputs={"regex": regex})
        self.preparation.submit(
            params, tenant, prepare, lambda result: self.ended.put((regex, result))
        )

    def try_later(self, regex, seconds=0.0):
        self.grammars.trials[regex] = Future()
        self.grammars.seconds[regex] = seconds

    def next(self):
        return self.ended.get(timeout=60)


@pytest.fixture
def masks():
    return Masks()


def test_what_is_compiled_waits_neither_for_trials_nor_for_others(masks):
    held = threading.Event()
    masks.try_later("on trial")
    masks.grammars.seconds["slow"] = 1.0
    masks.grammars.compiled.add("known")
    masks.ask("on trial")
    masks.ask("quick", held.wait)
    masks.ask("slow", held.wait)
    masks.ask("known")
    assert masks.next() == ("known", MASK)
    held.set()
    assert {masks.next()[0], masks.next()[0]} == {"quick", "slow"}
    masks.grammars.trials["on trial"].set_result(None)
    assert masks.next() == ("on trial", MASK)


def test_what_is_quickly_compiled_does_not_wait_for_what_is_not(masks):
    held = threading.Event()
    for regex, seconds in (("slow", 0.4), ("quick", 0.01)):
        masks.try_later(regex, seconds)
        masks.ask(regex, held.wait if regex == "slow" else lambda: MASK)
        masks.grammars.trials[regex].set_result(None)
    assert masks.next() == ("quick", MASK)
    held.set()
    assert masks.next()[0] == "slow"


def test_few_wait_for_being_compiled_slowly(masks):
    held, is_begun = threading.Event(), threading.Event()

    def wait():
        is_begun.set()
        held.wait()
        return MASK

    masks.grammars.seconds = {f"slow {number}": 1.0 for number in range(18)}
    masks.ask("slow 0", wait)
    is_begun.wait()
    for number in range(1, 18):
        masks.ask(f"slow {number}")
    regex, error = masks.next()
    assert regex == "slow 17" and isinstance(error, QueueFullError) and error.retry_after == 2.0
    held.set()
    assert [masks.next()[0] for _ in range(17)] == [f"slow {number}" for number in range(17)]


def test_errors_come_as_they_are(masks):
    busy, refused, broken = QueueFullError("busy"), ConstraintError("none"), ZeroDivisionError()
    masks.try_later("a")
    masks.ask("a")
    masks.grammars.trials["a"].set_exception(refused)
    assert masks.next() == ("a", refused)

    def fail():
        raise broken

    masks.ask("b", fail)
    assert masks.next() == ("b", broken)
    masks.grammars.error = busy
    masks.ask("c")
    assert masks.next() == ("c", busy)


def test_a_fault_of_whoever_asked_ends_no_thread(masks):
    params = SamplingParams(structured_outputs={"regex": "broken"})
    masks.preparation.submit(params, "", lambda: MASK, lambda result: 1 / 0)
    masks.ask("a")
    assert masks.next() == ("a", MASK)


def test_trials_are_asked_for_in_the_name_of_a_tenant(masks):
    masks.ask("a", tenant="ann")
    masks.next()
    assert masks.grammars.tenants == ["ann"]
