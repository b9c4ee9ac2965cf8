"""Measurement of links: what comes back, and what is made of its times."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("cryptography", reason="connections between machines need certificates")

from link_ends import two_ends

from octavo.base.errors import LinkError
from octavo.links.echo import measure, send_back
from octavo.links.frames import PROBE


@pytest.fixture
def echoed():
    with two_ends() as (here, there):
        raised = []

        def run():
            try:
                send_back(there)
            except LinkError as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        yield here, raised
        here.close()
        thread.join()


def test_frames_come_back_whole_or_as_their_first_bytes(echoed):
    link, _ = echoed
    link.start({PROBE: 1 << 20})
    for sent, got in (
        (b"", b""),
        (b"\0" * 5000, b"\0" * 5000),
        (b"\1" + bytes(99999), b"\1" + bytes(7)),
    ):
        link.send(PROBE, sent)
        assert bytes(link.receive().data) == got


def test_times_are_one_way_and_agree_with_each_other(echoed):
    link, raised = echoed
    times = measure(link, seconds=0.2)
    assert 0 < times.latency_s <= times.latency_p99_s
    assert times.bandwidth > 0
    assert times.num_round_trips >= 3
    link.close()
    assert not raised


def test_a_cut_is_told():
    with two_ends() as (here, there):
        thread = threading.Thread(target=lambda: here.end(LinkError("cut")))
        thread.start()
        with pytest.raises(LinkError, match="cut"):
            send_back(there)
        thread.join()
