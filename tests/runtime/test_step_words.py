"""Messages to followers: their size, and that a follower believes none of them."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from native_requests import make_requests
from rank_threads import lone_follower, num_refused

from octavo.base.errors import EngineError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cpu import library
from octavo.runtime.step_words import (
    COPY,
    EXIT,
    MOVE,
    STEP,
    BadMessage,
    Reader,
    StepHeader,
    change_words,
    copy_words,
    move_words,
)

needs_native = pytest.mark.skipif(not library.runnable(), reason="no native library was built")


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_a_reader_goes_from_the_beginning_to_the_end():
    reader = Reader(words(STEP, *range(11), 0, 3, 2, 2, 7, 8))
    assert reader.number("the kind of a message", STEP, EXIT) == STEP
    assert reader.header() == StepHeader(*range(11))
    change = reader.change(1, 4, 4)
    assert (change.group, change.row, change.first, list(change.entries)) == (0, 3, 2, [7, 8])
    reader.end()
    assert change_words(0, 3, 2, [7, 8]) == [0, 3, 2, 2, 7, 8]
    assert list(copy_words([(1, 2), (3, 4)])) == [COPY, 1, 2, 3, 4]
    assert list(move_words([5, 6], [17, 19], 16)) == [MOVE, 16, 2, 17, 19, 5, 6]


@pytest.mark.parametrize(
    "numbers",
    [(), (1, 0, 0, 0), (0, 4, 0, 0), (0, 0, 5, 0), (0, 0, 2, 3, 1, 1, 1), (0, 0, 0, 2, 1)],
)
def test_changes_of_tables_stay_within_them(numbers):
    with pytest.raises(BadMessage):
        Reader(words(*numbers)).change(1, 4, 4)


@needs_native
def test_a_decoding_step_takes_forty_bytes_a_request(bench):
    engine = bench.engine(128, kernels="native", tp=2, max_model_len=512, max_num_seqs=16)
    params = SamplingParams(max_tokens=40, temperature=0.7, ignore_eos=True, repetition_penalty=1.1)
    for index in range(16):
        engine.add(Request(f"r{index}", list(range(5, 25 + index)), params, 0.0, seed=index))
    group, sizes = engine.executor.spec.group, []
    while True:
        before = group.counts
        if (step := engine.step()) is None:
            break
        made = group.counts
        if all(item.num_tokens == 1 for item in step.batch.items):
            assert made.messages == before.messages + 1
            num_bytes = made.message_bytes - before.message_bytes
            sizes.append((step.batch.num_seqs, num_bytes))
    assert len(sizes) > 30
    assert all(num_bytes <= 40 * num_seqs + 200 for num_seqs, num_bytes in sizes), sizes


@pytest.fixture
def sent(bench, run_all, monkeypatch):
    """The messages of a run with all kinds of steps, and copies of blocks."""
    messages: list[np.ndarray] = []
    engine = bench.engine(kernels="native", tp=2, num_blocks=10, num_places=30)
    group = engine.executor.spec.group
    send = group.send

    def keep(message: array[int]) -> None:
        messages.append(np.array(message, dtype=np.int32))
        send(message)

    monkeypatch.setattr(group, "send", keep)
    run_all(engine, make_requests(bench.config.vocab_size, count=6))
    assert {int(message[0]) for message in messages} >= {STEP, COPY}
    return messages


@needs_native
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize("seed", range(8))
def test_damaged_messages_are_refused_or_harmless(bench, sent, seed, layout):
    """Cut, repeated, and with other numbers in them: none reads or writes beyond an array. A first
    stage computes until it hands on."""
    engine = bench.engine(kernels="native", num_blocks=10, num_places=30, **layout)
    follower = lone_follower(engine.executor, bench.model, bench.config)
    assert num_refused(follower, sent, seed) > 50


@needs_native
def test_garbage_is_refused(bench):
    engine = bench.engine(kernels="native", tp=2)
    follower = lone_follower(engine.executor, bench.model, bench.config)
    garbage = np.random.default_rng(3)
    for _ in range(200):
        message = garbage.integers(-(2**31), 2**31, garbage.integers(1, 60), dtype=np.int64)
        with pytest.raises((BadMessage, EngineError)):
            follower.obey(message.astype(np.int32))
