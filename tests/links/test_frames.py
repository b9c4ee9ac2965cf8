"""Frames: which headers may come, whatever is sent."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import LinkError
from octavo.links.frames import (
    HEADER_BYTES,
    MESSAGE,
    ROWS,
    WORDS,
    Header,
    IncomingFrames,
    OutgoingFrames,
)

LIMITS = {MESSAGE: 100, WORDS: 4096}


def incoming() -> IncomingFrames:
    return IncomingFrames(LIMITS)


@given(st.lists(st.sampled_from([(MESSAGE, 0), (MESSAGE, 100), (WORDS, 7), (WORDS, 4096)])))
def test_what_one_end_writes_the_other_takes(frames):
    outgoing, taken = OutgoingFrames(), incoming()
    for kind, num_bytes in frames:
        assert taken.header(outgoing.header(kind, num_bytes)) == Header(kind, num_bytes)


@given(st.data())
def test_frames_that_are_left_out_repeated_or_swapped_are_refused(data):
    outgoing = OutgoingFrames()
    headers = [outgoing.header(WORDS, 4) for _ in range(6)]
    order = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    taken = incoming()
    for due, number in enumerate(order):
        if number != due:
            with pytest.raises(LinkError, match=f"frame {number} came where frame {due} was due"):
                taken.header(headers[number])
            return
        taken.header(headers[number])


@pytest.mark.parametrize(
    ("kind", "num_bytes", "why"),
    [
        (MESSAGE, 101, "MESSAGE frame of 101 bytes: 100 are the most"),
        (WORDS, (1 << 32) - 1, "4,294,967,295 bytes"),
        (ROWS, 0, "kind ROWS cannot come here"),
        (0, 0, "kind 0 cannot"),
        (255, 0, "kind 255 cannot"),
    ],
)
def test_what_is_too_long_or_not_expected_is_refused(kind, num_bytes, why):
    with pytest.raises(LinkError, match=why):
        incoming().header(OutgoingFrames().header(kind, num_bytes))


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_garbage_is_refused_or_is_within_the_limits(data):
    try:
        header = incoming().header(data)
    except LinkError:
        return
    assert header.num_bytes <= LIMITS[header.kind]
    assert struct.unpack("<B3sIQ", data)[1::2] == (b"\0\0\0", 0)
