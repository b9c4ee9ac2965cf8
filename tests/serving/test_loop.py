"""The loop around an engine: the commands that it carries out, and what must not end it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from hash_model import expected_tokens

from octavo.core.sampling_params import SamplingParams
from octavo.serving.loop import EngineLoop


class Panic(BaseException):
    """What a library in Rust raises when it panics: no Exception."""


class Client:
    """Takes what a driver delivers; ends its ``run`` when ``wanted`` requests have ended."""

    def __init__(self, engine, wanted=1):
        self.driver = EngineLoop(engine, self.deliver)
        self.tokens, self.num_steps, self.wanted = {}, 0, wanted

    def add(self, request_id, prompt, max_tokens=5):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.driver.engine.add(request_id, None, prompt, params)

    def deliver(self, deltas, step):
        self.num_steps += 1
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.wanted -= delta.finish_reason is not None
        if not self.wanted:
            self.driver.stop()


@pytest.fixture
def engine(hash_engine):
    return hash_engine()


def test_it_obeys_in_order_and_delivers_every_step(engine):
    client = Client(engine, wanted=2)
    client.driver.tell(lambda: client.add("a", [1, 2]))
    client.driver.tell(lambda: client.add("b", [3]))
    client.driver.tell(lambda: client.add("c", [4], 200))
    client.driver.run()
    assert client.tokens["a"] == expected_tokens([1, 2], 5, 97)
    assert client.tokens["b"] == expected_tokens([3], 5, 97)
    assert client.num_steps == 5 and len(client.tokens["c"]) == 5
    # What still ran has been aborted.
    assert not engine.has_unfinished_requests
    assert engine.engine.scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_no_command_can_end_it(engine, error, caplog):
    def fail():
        raise error("as asked")

    client = Client(engine)
    client.driver.tell(fail)
    client.driver.tell(lambda: client.add("a", [1]))
    client.driver.tell(fail)
    client.driver.run()
    assert client.tokens["a"] == expected_tokens([1], 5, 97)
    assert caplog.text.count(error.__name__) == 2


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_program_gets_through(engine, ending):
    def end():
        raise ending

    client = Client(engine)
    client.driver.tell(end)
    with pytest.raises(ending):
        client.driver.step()


def test_a_flood_of_commands_does_not_keep_it_from_stepping(engine):
    client = Client(engine)
    client.add("a", [1])
    driver = client.driver

    def again():
        driver.tell(again)

    again()
    driver.run()
    assert client.tokens["a"] == expected_tokens([1], 5, 97)


def test_it_waits_for_commands_and_stops_from_another_thread(engine):
    client = Client(engine, wanted=0)
    thread = threading.Thread(target=client.driver.run)
    thread.start()
    obeyed = threading.Event()
    client.driver.tell(obeyed.set)
    assert obeyed.wait(10) and client.num_steps == 0
    client.driver.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_it_looks_for_damage_when_all_is_delivered_and_nobody_waits(engine):
    client = Client(engine, wanted=3)
    audit, seen = engine.engine.audit, []

    def watched():
        seen.append((engine.has_unfinished_requests, dict(client.tokens)))
        return audit()

    engine.engine.audit = watched
    client.add("a", [1])
    blocks = engine.engine.scheduler.block_manager
    while engine.has_unfinished_requests:
        client.driver.step()
    assert [tokens for is_busy, tokens in seen if not is_busy][0] == client.tokens
    assert engine.engine.num_invariant_violations == 0
    client.add("b", [2], 1)
    blocks.ref_counts[blocks.num_blocks - 1] += 1
    client.driver.step()
    assert engine.engine.num_invariant_violations > 0


def test_a_finalizer_may_tell_it_something(engine):
    """However it is called: here, by a garbage collection in the middle of a step."""

    class Holder:
        pass

    client = Client(engine)
    client.add("kept", [1])
    client.add("forgotten", [2])
    holder = Holder()
    holder.myself = holder
    weakref.finalize(holder, client.driver.tell, lambda: engine.abort("forgotten"))
    del holder
    submit = engine.engine.executor.submit
    engine.engine.executor.submit = lambda batch: (gc.collect(), submit(batch))[1]
    client.driver.run()
    assert client.tokens["kept"] == expected_tokens([1], 5, 97)
    assert client.tokens["forgotten"] == expected_tokens([2], 1, 97)
