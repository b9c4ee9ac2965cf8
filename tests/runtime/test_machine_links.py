"""Messages and hidden states between machines: what one end sends the other has, bit for bit."""

from __future__ import annotations

import contextlib
import threading
from array import array

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="connections between machines need certificates")

from link_ends import two_ends

from octavo.base.errors import EngineError, LinkError, PeerEndedError
from octavo.kernels.cpu import library
from octavo.kernels.cpu.group import ShmGroup
from octavo.links.frames import MESSAGE, ROWS, WORDS
from octavo.runtime.capacity import RankLimits
from octavo.runtime.machine_links import (
    MachineLink,
    ReceivedMessages,
    SentMessages,
    most_message_bytes,
)
from octavo.runtime.stage_links import ShmLink, StageFailedError

LIMITS = RankLimits(num_blocks=64, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64)
WIDTHS = (48, 16)


@pytest.fixture
def over_tcp():
    with two_ends() as (home, follower):
        home.start({MESSAGE: 1000})
        follower.start({WORDS: most_message_bytes(LIMITS, 16)})
        sends, receives = MachineLink(follower), MachineLink(home, {MESSAGE: 1000})
        for end in (receives, sends):
            end.open(WIDTHS, 64, 2)
        yield sends, receives


@pytest.fixture
def in_memory():
    if not library.runnable():
        pytest.skip("no native library was built")
    with ShmGroup.create(2, num_bytes=4 << 20, is_crowded=True) as group:
        import os

        with ShmGroup.attach(os.dup(group.fd), 1, 2, is_crowded=True) as other:
            sends, receives = ShmLink(group), ShmLink(other)
            for end in (receives, sends):
                end.open(WIDTHS, 64, 2)
            yield sends, receives


@pytest.fixture(params=["over_tcp", "in_memory"])
def ends(request):
    return request.getfixturevalue(request.param)


def values_of(num_tokens: int, seed: int) -> list[np.ndarray]:
    bits = np.random.default_rng(seed)
    return [
        bits.integers(0, 2**32, (num_tokens, width), dtype=np.uint32).view(np.float32)
        for width in WIDTHS
    ]


def empty(num_tokens: int) -> list[np.ndarray]:
    return [np.empty((num_tokens, width), dtype=np.float32) for width in WIDTHS]


def test_values_arrive_with_all_their_bits(ends):
    """Those of NaN, too."""
    sends, receives = ends
    for number, num_tokens in enumerate((1, 64, 7)):
        sent, got = values_of(num_tokens, number), empty(num_tokens)
        sends.send(number, sent)
        receives.receive(number, got)
        for here, there in zip(sent, got, strict=True):
            assert np.array_equal(here.view(np.int32), there.view(np.int32))


def test_values_may_be_overwritten_once_they_are_sent(ends):
    sends, receives = ends
    sent = values_of(64, 1)
    first = [value.copy() for value in sent]
    sends.send(0, sent)
    for value in sent:
        value[:] = 0
    got = empty(64)
    receives.receive(0, got)
    for here, there in zip(first, got, strict=True):
        assert np.array_equal(here.view(np.int32), there.view(np.int32))


def test_a_step_that_has_failed_is_told_in_its_words_and_the_next_one_goes_on(ends):
    sends, receives = ends
    sends.fail(5, "NaN in layer 3: 1 of 4")
    with pytest.raises(StageFailedError, match="^NaN in layer 3: 1 of 4$"):
        receives.receive(5, empty(4))
    sent, got = values_of(4, 6), empty(4)
    sends.send(6, sent)
    receives.receive(6, got)
    assert np.array_equal(sent[0].view(np.int32), got[0].view(np.int32))


def test_long_reasons_and_other_alphabets_pass(ends):
    sends, receives = ends
    sends.fail(1, "é" * 5000)
    with pytest.raises(StageFailedError, match="éééé"):
        receives.receive(1, empty(1))


@pytest.mark.parametrize(("number", "num_tokens"), [(2, 4), (1, 5)])
def test_another_step_is_an_error(ends, number, num_tokens):
    sends, receives = ends
    sends.send(1, values_of(4, 1))
    with pytest.raises(EngineError, match="not in step"):
        receives.receive(number, empty(num_tokens))


def test_who_waits_is_told_when_either_end_aborts(ends):
    for aborting in ends:
        raised = []

        def wait(raised=raised):
            try:
                ends[1].receive(0, empty(1))
            except PeerEndedError as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        aborting.abort()
        thread.join()
        assert len(raised) == 1


def test_values_of_another_size_are_an_error_and_are_not_read(over_tcp):
    sends, receives = over_tcp
    sends._link.send(ROWS, np.array([0, 4, 1, 2, 3], dtype=np.int32))
    with pytest.raises(EngineError, match="20 bytes, and 1,032 are due"):
        receives.receive(0, empty(4))
    sends._link.send(ROWS, b"123")
    with pytest.raises(EngineError, match="not in step"):
        receives.receive(1, empty(4))


def test_more_rows_than_there_can_be_end_the_link(over_tcp):
    sends, receives = over_tcp
    with contextlib.suppress(LinkError):  # it may end while this is being sent
        sends._link.send(ROWS, bytes(4 * (2 + 64 * sum(WIDTHS)) + 1))
    with pytest.raises(PeerEndedError, match="are the most"):
        receives.receive(0, empty(4))


def test_words_come_as_they_were_sent():
    with two_ends() as (home, follower):
        home.start({})
        follower.start({WORDS: most_message_bytes(LIMITS, 16)})
        sends, receives = SentMessages([home]), ReceivedMessages(follower)
        assert sends.pieces(1 << 20) <= sends.room
        for words in ([1], [1, -2, 3], [*range(8000)]):
            sends.send(array("i", words))
            assert receives.receive().tolist() == words
        home.send(WORDS, b"123")
        with pytest.raises(EngineError, match="3 bytes is no words"):
            receives.receive()
        sends.abort()
        with pytest.raises(PeerEndedError):
            receives.receive()
        with pytest.raises(PeerEndedError):
            sends.send(array("i", [1]))


def test_as_many_messages_as_have_room_do_not_make_the_home_rank_wait():
    with two_ends() as (home, follower):
        home.start({})
        follower.start({WORDS: most_message_bytes(LIMITS, 16)})
        sends, receives = SentMessages([home]), ReceivedMessages(follower)
        for number in range(sends.room):
            sends.send(array("i", [number] * 500))
        assert [int(receives.receive()[0]) for _ in range(sends.room)] == [*range(sends.room)]


@pytest.mark.parametrize(
    ("text", "why"),
    [(b'{"error": "BadMessage: no"}', "BadMessage: no"), (b"{}", "no error"), (b"[", "no error")],
)
def test_a_rank_that_cannot_go_on_says_why(over_tcp, text, why):
    sends, receives = over_tcp
    sends._link.send(MESSAGE, text)
    with pytest.raises(PeerEndedError, match=f"rank 1 at .*{why}"):
        receives.receive(0, empty(1))
