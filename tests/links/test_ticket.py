"""Tickets: their form, and that their secret is not shown."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.links.ticket import (
    TICKET_VARIABLE,
    Address,
    Ticket,
    parse_address,
    parse_ticket,
    receive_ticket,
)

TICKET = Ticket(Address("10.0.0.5", 7000), bytes(range(32)), bytes(range(100, 132)))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node-1", Address("node-1", 0)),
        ("10.0.0.5:7000", Address("10.0.0.5", 7000)),
        ("[::1]:80", Address("::1", 80)),
        ("[fe80::1%eth0]", Address("fe80::1%eth0", 0)),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", ":80", "a:70000", "a:b", "::1", "a b", "a/b", "a:1:2"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="is no address"):
        parse_address(text)


@given(st.binary(min_size=32, max_size=32), st.integers(0, 65535))
def test_a_ticket_is_read_as_it_was_written(token, port):
    ticket = Ticket(Address("::1", port), token[::-1], token)
    assert parse_ticket(ticket.secret_text() + "\n") == ticket


def test_the_token_is_not_shown():
    assert TICKET.token.hex() not in repr(TICKET)
    text = TICKET.secret_text()[:-1]
    with pytest.raises(ConfigError) as error:
        parse_ticket(text)
    assert TICKET.token.hex()[:-1] not in str(error.value)


def test_a_ticket_comes_by_the_environment_and_stays_there_no_longer(monkeypatch):
    monkeypatch.setenv(TICKET_VARIABLE, TICKET.secret_text())
    assert receive_ticket() == TICKET
    assert TICKET_VARIABLE not in os.environ


def test_or_by_standard_input(monkeypatch):
    monkeypatch.delenv(TICKET_VARIABLE, raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(TICKET.secret_text() + "\nmore"))
    assert receive_ticket() == TICKET
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="one line of HOST:PORT/FINGERPRINT/TOKEN"):
        receive_ticket()
