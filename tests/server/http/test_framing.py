from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.http.errors import HttpError
from octavo.server.http.framing import ChunkedBody, create_body, header_length, without_upgrade

HEADER = b"POST /x?y HTTP/1.1\r\nHost: a\r\nX: b\tc\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("rest", [b"", b"body", b"\n\r\n\r\n\x00"])
def test_a_header_ends_at_its_empty_line(step, rest):
    data, num_checked = HEADER + rest, 0
    for end in [*range(step, len(data), step), len(data)]:
        if length := header_length(data[:end], num_checked):
            break
        assert end < len(HEADER)
        num_checked = end
    assert length == len(HEADER)


@pytest.mark.parametrize(
    "data, num_checked",
    [
        (b"GET / HTTP/1.1\rX", 15),
        (b"GET / HTTP/1.1\r\nHost: a\n", 23),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00", 27),
        (b"GET /\r\n", 6),
        (b"\x16\x03", 0),
    ],
)
def test_what_cannot_become_a_header_is_refused_before_its_end(data, num_checked):
    assert header_length(data[:num_checked], 0) == 0
    with pytest.raises(HttpError) as raised:
        header_length(data, num_checked)
    assert raised.value.status == 400


@given(st.lists(st.binary(min_size=1, max_size=300)), st.data())
def test_chunks_end_where_they_end_however_they_are_cut(parts, data):
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    cuts = data.draw(st.lists(st.integers(0, len(framed))))
    edges = [0, *sorted(cuts), len(framed)]
    body = ChunkedBody()
    for start, end in zip(edges, edges[1:], strict=False):
        assert body.consume(framed[start:end]) == end - start
    assert body.is_complete
    assert body.consume(b"GET") == 0
    whole = ChunkedBody()
    assert whole.consume(framed + b"GET / HTTP/1.1\r\n\r\n") == len(framed)


@given(st.binary(max_size=60))
def test_anything_else_is_refused_or_unfinished(data):
    body = ChunkedBody()
    try:
        length = body.consume(data)
    except HttpError as error:
        assert error.status == 400
    else:
        assert length == len(data) or body.is_complete


def test_the_length_of_a_body():
    host = (b"host", b"a")
    sized = create_body([host, (b"content-length", b"7")], "1.1")
    assert (sized.consume(b"12345"), sized.is_complete) == (5, False)
    assert (sized.consume(b"67GET"), sized.is_complete) == (2, True)
    assert create_body([host], "1.1").is_complete
    assert isinstance(create_body([host, (b"transfer-encoding", b"chunked")], "1.1"), ChunkedBody)


def test_an_offer_of_another_protocol_is_taken_out():
    header = (
        b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nHost: a\r\nupgrade:websocket\r\nX-Upgrade: b\r\n\r\n"
    )
    assert without_upgrade(header) == b"GET / HTTP/1.1\r\nHost: a\r\nX-Upgrade: b\r\n\r\n"
