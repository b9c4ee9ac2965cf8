from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.batch import TokenLogprobs
from octavo.server.generation import Delta
from octavo.server.wire import Decoder, delta_from_list, delta_to_list, encode

MESSAGES = st.lists(
    st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.lists(st.integers())))
)


@given(MESSAGES, st.data())
def test_messages_survive_any_cuts(messages, data):
    stream = b"".join(map(encode, messages))
    decoder, found = Decoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    assert found == messages


def test_an_absurd_length_is_not_allocated():
    with pytest.raises(ValueError, match="4294967295 bytes"):
        list(Decoder().feed(b"\xff\xff\xff\xff"))


LOGPROB = TokenLogprobs(5, -0.25, 2, ((7, -0.125), (5, -0.25)))


@pytest.mark.parametrize(
    "delta",
    [
        Delta(0, "", []),
        Delta(1, "é\ud800\n", [1, 2]),
        Delta(0, "a", [5], [LOGPROB]),
        Delta(0, "a", [5], [], "stop", "###", -1.5),
        Delta(3, "", [5], [LOGPROB], "error", None, None, "NaN"),
        Delta(0, "a", [5], [LOGPROB._replace(logprob=float("-inf"))], "stop", 7),
    ],
)
def test_deltas_come_back_as_they_were(delta):
    sent = json.loads(encode({"x": delta_to_list("r", delta)})[4:])["x"]
    assert delta_from_list(sent) == ("r", delta)
