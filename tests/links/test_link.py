"""Links: frames in both directions, and each way in which they end."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="connections between machines need certificates")

from link_ends import FACTS, RawPeer, two_ends

from octavo.base.errors import LinkError
from octavo.links.frames import BEAT, END, MESSAGE, ROWS, WORDS
from octavo.links.link import MOST_WAITING, Patience
from octavo.links.listener import Listener

SECONDS = 60.0  # of which none is waited for where all is well
LIMITS = {WORDS: 1 << 20, ROWS: 8 << 20, MESSAGE: 1000}


@pytest.fixture
def ends():
    with two_ends() as (ours, theirs):
        ours.start(LIMITS)
        theirs.start(LIMITS)
        yield ours, theirs


@pytest.fixture
def raw():
    """``(link, peer)``: a link whose other end sends what it likes."""
    with Listener() as listener:
        invitation = listener.invite("rank 1", FACTS)
        with RawPeer(invitation.ticket) as peer:
            peer.send(peer.hello(invitation.ticket))
            with invitation.wait(SECONDS) as link:
                link.start({WORDS: 1000, MESSAGE: 1000})
                yield link, peer


def test_frames_come_as_they_were_sent_in_both_directions(ends):
    sent = [(WORDS, os.urandom(size)) for size in (0, 1, 4, 16368, 16369, 1 << 20)]
    sent += [(ROWS, os.urandom(8 << 20))]
    for here, there in (ends, ends[::-1]):
        thread = threading.Thread(target=lambda to=here: [to.send(*each) for each in sent])
        thread.start()
        assert [(kind, bytes(data)) for kind, data in (there.receive() for _ in sent)] == sent
        thread.join()


def test_both_ends_may_send_more_than_the_network_holds(ends):
    rows = bytes(8 << 20)
    senders = [
        threading.Thread(target=lambda to=end: [to.send(ROWS, rows) for _ in range(4)])
        for end in ends
    ]
    for each in senders:
        each.start()
    for end in ends:
        assert [len(end.receive().data) for _ in range(4)] == [len(rows)] * 4
    for each in senders:
        each.join()


def test_frames_of_several_threads_are_not_mixed(ends):
    here, there = ends
    threads = [
        threading.Thread(target=lambda n=n: [here.send(WORDS, bytes([n]) * 40000) for _ in "abcde"])
        for n in range(4)
    ]
    for each in threads:
        each.start()
    frames = [bytes(there.receive().data) for _ in range(20)]
    assert all(len(set(frame)) == 1 for frame in frames)
    for each in threads:
        each.join()


def test_who_does_not_receive_makes_the_other_wait_and_nothing_is_lost(ends):
    here, there = ends
    count = 2 * MOST_WAITING
    sender = threading.Thread(target=lambda: [here.send(WORDS, bytes([n])) for n in range(count)])
    sender.start()
    assert [there.receive().data[0] for _ in range(count)] == list(range(count))
    sender.join()


def test_delivered_frames_come_in_order_and_what_is_raised_ends_the_link():
    with two_ends() as (ours, theirs):
        got: list[bytes] = []

        def deliver(frame):
            got.append(bytes(frame.data))
            if len(got) == 3:
                raise ValueError("this one\ndoes not fit")

        ours.start(LIMITS, deliver)
        theirs.start(LIMITS)
        for data in (b"a", b"bb" * 9000, b"c"):
            theirs.send(WORDS, data)
        with pytest.raises(LinkError):
            theirs.receive()
        assert got == [b"a", b"bb" * 9000, b"c"]
        assert "does not fit" in str(ours.failure)


def test_a_clear_end_is_told_from_a_cut(ends):
    here, there = ends
    here.close()
    with pytest.raises(
        LinkError, match="rank 1 at .*: the other end has closed the link|rank 0 at"
    ):
        there.receive()
    assert "has closed the link" in str(there.failure)
    with pytest.raises(LinkError, match="was closed here"):
        here.receive()
    with pytest.raises(LinkError):
        there.send(WORDS, b"1")
    with pytest.raises(LinkError):
        there.receive()  # every time


def test_all_are_told_of_the_end_whenever_they_ask(ends):
    here, there = ends
    before, after = threading.Event(), threading.Event()
    there.when_it_ends(lambda why: before.set())
    here.end(LinkError("the engine has ended"))
    assert before.wait(SECONDS)
    there.when_it_ends(lambda why: after.set())
    assert after.is_set()
    assert str(here.failure) == "the engine has ended"


BAD = {
    "cut in mid-frame": (lambda peer: peer.frame(WORDS, bytes(100))[:50], "was cut"),
    "cut in a header": (lambda peer: peer.frame(WORDS, bytes(100))[:9], "was cut"),
    "without a word": (lambda peer: b"", "was cut"),
    "too long": (lambda peer: peer.frame(WORDS, bytes(1001)), "1,000 are the most"),
    "repeated": (lambda peer: peer.frame(WORDS) * 2, "frame 1 came where frame 2 was due"),
    "left out": (lambda peer: (peer.frame(WORDS), peer.frame(WORDS))[1], "where frame 1 was due"),
    "swapped": (lambda p: b"".join([p.frame(WORDS), p.frame(WORDS)][::-1]), "frame 1 was due"),
    "unexpected": (lambda peer: peer.frame(ROWS, b"1234"), "kind ROWS cannot come here"),
    "a beat with bytes": (lambda peer: peer.frame(BEAT, b"1"), "0 are the most"),
    "an end with bytes": (lambda peer: peer.frame(END, b"1"), "0 are the most"),
    "a second hello": (lambda peer: peer.frame(1, bytes(40)), "kind HELLO cannot come here"),
    "garbage": (lambda peer: b"\xff" * 64, "kind 255 cannot come here"),
}


@pytest.mark.parametrize("what", BAD)
def test_damaged_frames_end_the_link_with_one_line(raw, what):
    link, peer = raw
    data, why = BAD[what]
    peer.send(data(peer) or b"")
    if "was cut" in why:
        peer.close()
    else:
        assert peer.is_cut()
    with pytest.raises(LinkError) as error:
        while True:
            link.receive()
    assert why in str(error.value)
    assert str(error.value).startswith("rank 1 at 127.0.0.1:")
    assert "\n" not in str(error.value)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_of_a_byte_of_a_header_ends_the_link(data):
    with Listener() as listener:
        invitation = listener.invite("rank 1", FACTS)
        with RawPeer(invitation.ticket) as peer:
            peer.send(peer.hello(invitation.ticket))
            with invitation.wait(SECONDS) as link:
                link.start({WORDS: 1000})
                frame = bytearray(peer.frame(WORDS, bytes(8)))
                place = data.draw(st.integers(0, 15))
                frame[place] ^= data.draw(st.integers(1, 255))
                peer.send(bytes(frame) + peer.frame(WORDS, bytes(8)))
                peer.close()
                with pytest.raises(LinkError):
                    for _ in range(2):
                        link.receive()


def test_what_may_come_can_change(raw):
    link, peer = raw
    peer.send(peer.frame(WORDS, bytes(8)))
    assert len(link.receive().data) == 8
    link.allow({ROWS: 8})
    peer.send(peer.frame(ROWS, bytes(8)))
    assert link.receive().kind == ROWS
    peer.send(peer.frame(WORDS, bytes(8)))
    assert peer.is_cut()


@pytest.mark.parametrize("text", [b"[]", b"{", b"[" * 900, b"\xff", b""])
def test_what_is_no_message_ends_the_link(raw, text):
    link, peer = raw
    peer.send(peer.frame(MESSAGE, text))
    with pytest.raises(LinkError, match="an object of JSON was due"):
        link.receive_message()
    assert peer.is_cut()


def test_a_link_without_work_stays_as_both_say_that_they_are_alive():
    with two_ends(Patience(beat_s=0.02, silence_s=1.5)) as (ours, theirs):
        ours.start(LIMITS)
        theirs.start(LIMITS)
        time.sleep(2.0)
        theirs.send(WORDS, b"1234")
        assert bytes(ours.receive().data) == b"1234"


def test_a_peer_that_says_nothing_is_taken_to_be_gone():
    patience = Patience(beat_s=0.05, silence_s=0.2)
    with Listener(patience=patience) as listener:
        invitation = listener.invite("rank 1", FACTS)
        with RawPeer(invitation.ticket) as peer:
            peer.send(peer.hello(invitation.ticket))
            with invitation.wait(SECONDS) as link:
                link.start({WORDS: 1000})
                with pytest.raises(LinkError, match="nothing was heard from it for 0.2"):
                    link.receive()


def test_a_peer_that_takes_nothing_is_taken_to_be_gone(raw):
    patience = Patience(beat_s=0.05, silence_s=0.2)
    with Listener(patience=patience) as listener:
        invitation = listener.invite("rank 1", FACTS)
        with RawPeer(invitation.ticket) as peer:
            peer.send(peer.hello(invitation.ticket))
            with invitation.wait(SECONDS) as link, pytest.raises(LinkError, match="took too long"):
                while True:
                    link.send(ROWS, bytes(1 << 16))


def test_a_link_that_was_never_started_is_closed():
    with two_ends() as (ours, theirs):
        ours.close()
        theirs.start(LIMITS)
        with pytest.raises(LinkError):
            theirs.receive()


def test_no_thread_and_no_descriptor_is_left():
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    def names() -> int:
        return sum(each.name.startswith("octavo-") for each in threading.enumerate())

    before, running = descriptors(), names()
    for _ in range(5):
        with two_ends() as (ours, theirs):
            ours.start(LIMITS)
            theirs.start(LIMITS)
            ours.send(WORDS, b"12")
            theirs.receive()
    deadline = time.monotonic() + SECONDS
    while (descriptors(), names()) != (before, running):  # threads of handshakes end by themselves
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_small_frames_are_not_held_back(ends):
    """As Nagle's rule would, to send several together."""
    for end in ends:
        assert end._connection.tls.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
