"""By which names a server may be asked: a page that makes a name lead here must not be served."""

from __future__ import annotations

import socket

import pytest

from octavo.server.http.hosts import AllowedHosts
from octavo.server.settings import ServerSettings

ADDRESSES = [
    "127.0.0.1",
    "192.168.1.7:8000",
    "10.0.0.1:80",
    "[::1]:8000",
    "[fe80::1]",
    "[2001:db8::5]",
]
NO_ADDRESSES = [
    "127.0.0.1.evil.example",
    "::1",
    "[127.0.0.1]",
    "1.2.3",
    "2130706433",
    "0x7f.1",
    "[]",
]


def hosts(*, is_open: bool = True, **settings) -> AllowedHosts:
    return AllowedHosts(ServerSettings(**settings), is_open=is_open)


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0", "::", "192.168.1.7"])
def test_addresses_lead_nowhere_else_and_names_may(listening):
    names = hosts(host=listening)
    assert all(map(names.accepts, ADDRESSES))
    assert not any(map(names.accepts, NO_ADDRESSES))
    assert names.accepts("localhost:8000")
    for foreign in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        assert not names.accepts(foreign)


def test_a_machine_on_a_network_knows_its_own_name():
    name = socket.gethostname().lower()
    assert hosts(host="0.0.0.0").accepts(f"{name}:8000")
    assert hosts(host="0.0.0.0").accepts(f"{name}.local")
    assert hosts(host="gpu.lab").accepts("gpu.lab:8000")


def test_every_address_as_it_is_typed_is_only_the_listeners():
    assert hosts(host="0.0.0.0").accepts("0.0.0.0:8000")  # the URL in the log
    assert not hosts().accepts("0.0.0.0:8000")
    assert not hosts().accepts("[::]:8000")


def test_further_names_are_given():
    names = hosts(host="0.0.0.0", allowed_host=("Octavo.example", "octavo"))
    assert names.accepts("octavo.example:443") and names.accepts("octavo")
    assert not names.accepts("www.octavo.example")
    assert hosts(allowed_host=("*",)).accepts("evil.example")


def test_behind_keys_a_network_may_use_any_name_and_loopback_may_not():
    assert hosts(host="0.0.0.0", is_open=False).accepts("llm.example")
    assert not hosts(is_open=False).accepts("llm.example")
