"""Links between replicas, as their server introduces them to each other."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest

pytest.importorskip("cryptography", reason="connections between machines need certificates")

from octavo.base.errors import ConfigError, LinkError  # noqa: E402
from octavo.core.block_store import following_keys, root_key  # noqa: E402
from octavo.offload import transfer_links  # noqa: E402
from octavo.offload.transfer_links import TransferLinks  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory of blocks is Linux's")

SIZE, PLACES = 4096, 8
KEYS = following_keys(root_key(""), range(128), 16)
SECONDS = 60.0


class Content:
    def __init__(self, **facts):
        self._facts = {"model": "m", **facts}

    def identity(self):
        raise AssertionError("that is of one machine")

    def facts(self):
        return self._facts


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def rows(first=0):
    return [memoryview(bytearray([first + place] * SIZE)) for place in range(PLACES)]


@pytest.fixture
def prefill():
    links = TransferLinks("127.0.0.1", (), 1 << 20)
    links.rows = rows(1)
    links.storage = links.open(links.rows, Content())
    yield links
    links.storage.close()


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.setattr(transfer_links, "_FIRST_PAUSE", 0.01)
    links = TransferLinks(None, [0], 1 << 20)
    links.rows = rows()
    links.storage = links.open(links.rows, Content())
    links.lost = []
    links.when_lost(links.lost.append)
    yield links
    links.storage.close()


def passed_on(prefill, decode, place):
    key = KEYS[place]
    assert prefill.storage.write(key, place)
    until(lambda: key in decode.storage)
    decode.storage.read(key, place)
    until(decode.storage.finished_transfers)
    return decode.rows[place] == prefill.rows[place]


def test_a_block_goes_from_one_storage_to_the_other(prefill, decode):
    assert decode.invite(1) is None  # it computes no prompts
    decode.connect(0, prefill.invite(1))
    assert passed_on(prefill, decode, 3)
    assert decode.storage.figures["kv_transfer_bytes_received"] == SIZE


def test_a_link_that_was_cut_is_asked_for_again(prefill, decode, caplog):
    decode.connect(0, prefill.invite(1))
    assert passed_on(prefill, decode, 3)
    (reader,) = prefill._own._readers
    reader.link.end(LinkError("a cable"))
    until(lambda: decode.lost)
    assert decode.lost == [0] and "does not come until" in caplog.text
    assert KEYS[3] not in decode.storage
    decode.storage.expect(0, KEYS)
    assert KEYS[4] not in decode.storage  # nothing is waited for
    decode.connect(0, prefill.invite(1))
    until(lambda: KEYS[3] in decode.storage)
    assert passed_on(prefill, decode, 4)


def test_who_cannot_be_reached_is_asked_for_ever_more_rarely(prefill, decode):
    ticket = prefill.invite(1)
    prefill.storage.close()
    until(lambda: threading.active_count())
    for count in range(1, 4):
        decode.connect(0, ticket)
        until(lambda count=count: len(decode.lost) == count)
    assert decode._pauses[0] == pytest.approx(0.08)


def test_another_model_is_refused_once_and_for_all(prefill, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    other = TransferLinks(None, [0], 1 << 20)
    storage = other.open(rows(), Content(model="another"))
    lost = []
    other.when_lost(lost.append)
    other.connect(0, prefill.invite(1))
    until(lambda: "model is m there, and another here" in caplog.text)
    assert not lost and not other._peers[0].is_open
    storage.close()


def test_strangers_and_what_is_no_ticket_are_nothing(prefill, decode):
    decode.connect(7, prefill.invite(1))
    decode.connect(0, "no ticket")
    decode.connect(0, prefill.invite(1))
    assert passed_on(prefill, decode, 1)


def test_a_buffer_without_room_names_its_setting():
    with pytest.raises(ConfigError, match="kv_buffer_size"):
        TransferLinks("127.0.0.1", (), 5000).open(rows(), Content())
