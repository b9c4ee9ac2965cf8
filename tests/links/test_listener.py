"""Tests of whom a listener lets in, and of what becomes of others."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="connections between machines need certificates")

from link_ends import FACTS, RawPeer, two_ends

from octavo.base.errors import ConfigError, LinkError
from octavo.links import certificate
from octavo.links.frames import HELLO, MESSAGE, WORDS, OutgoingFrames
from octavo.links.handshake import MAX_HELLO_BYTES, connect
from octavo.links.link import Patience
from octavo.links.listener import _MOST_UNKNOWN, Listener
from octavo.links.ticket import Address

SECONDS = 60.0  # of which none is waited for where all is well


@pytest.fixture
def listener():
    with Listener() as listening:
        yield listening


def lets_in(listener: Listener) -> bool:
    """Whether it lets in somebody who is invited, after all that has happened."""
    invitation = listener.invite("rank 7", FACTS)
    with connect(invitation.ticket, FACTS), invitation.wait(SECONDS):
        return True


def logged(caplog, *words: str) -> bool:
    """Wait until each of the words is in a line of the log that is one line."""
    deadline = time.monotonic() + SECONDS
    while True:
        lines = [record.getMessage() for record in caplog.records]
        assert not any("\n" in line for line in lines)
        if all(any(word in line for line in lines) for word in words):
            return True
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)


def test_it_listens_on_loopback_unless_told_otherwise(listener):
    assert listener.address.host == "127.0.0.1"
    with Listener(Address("0.0.0.0"), advertised="node-1") as other:
        assert other.address == Address("node-1", other.address.port)


def test_an_address_that_cannot_be_bound_is_refused(listener):
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Listener(listener.address)
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Listener(Address("203.0.113.7"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_are_none_that_a_ticket_could_name(host):
    with pytest.raises(ConfigError, match="others need one to connect to"):
        Listener(Address(host))


def test_addresses_of_six(listener):
    try:
        other = Listener(Address("::1"))
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with other:
        assert lets_in(other)


def test_no_key_is_left_in_a_file(listener, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    modes = []
    real = os.unlink
    monkeypatch.setattr(
        certificate.os,
        "unlink",
        lambda path: (modes.append(Path(path).stat().st_mode & 0o777), real(path)),
    )
    first, second = certificate.make_certificate(), certificate.make_certificate()
    assert first.fingerprint != second.fingerprint
    assert modes == [0o600, 0o600]
    assert not list(tmp_path.iterdir())


def test_a_ticket_is_used_once(listener, caplog):
    invitation = listener.invite("rank 1", FACTS)
    with connect(invitation.ticket, FACTS), invitation.wait(SECONDS):
        with pytest.raises(LinkError, match="does not take this ticket"):
            connect(invitation.ticket, FACTS)
        assert logged(caplog, "its token was used before")
    assert lets_in(listener)


def test_a_wrong_token_is_refused_alone(listener, caplog):
    invitation = listener.invite("rank 1", FACTS)
    wrong = dataclasses.replace(invitation.ticket, token=bytes(32))
    with pytest.raises(LinkError, match="does not take this ticket"):
        connect(wrong, FACTS)
    assert logged(caplog, "its token is not known")
    with connect(invitation.ticket, FACTS), invitation.wait(SECONDS):
        pass  # whose invitation is as it was


def test_another_certificate_gets_no_token(listener):
    with Listener() as other:
        invitation = listener.invite("rank 1", FACTS)
        there = dataclasses.replace(invitation.ticket, address=other.address)
        with pytest.raises(LinkError, match="fingerprint .*: another process listens there"):
            connect(there, FACTS)


def test_who_listens_without_tls_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as plain, Listener() as listener:

        def answer():
            accepted, _ = plain.accept()
            accepted.recv(100)
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            accepted.close()

        thread = threading.Thread(target=answer)
        thread.start()
        ticket = listener.invite("rank 1", FACTS).ticket
        ticket = dataclasses.replace(ticket, address=Address(*plain.getsockname()))
        with pytest.raises(LinkError, match="TLS: wrong version number"):
            connect(ticket, FACTS)
        thread.join()


def test_an_older_tls_is_refused(listener, caplog):
    import ssl

    context = certificate.connecting_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    address = (listener.address.host, listener.address.port)
    with socket.create_connection(address) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)
    assert logged(caplog, "TLS: unsupported protocol")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"octavo": "1.2.2", "kernel ABI": 14}, "octavo is 1.2.3 there, and 1.2.2 here"),
        ({"octavo": "1.2.3", "kernel ABI": 13}, "kernel ABI is 14 there, and 13 here"),
        ({"octavo": "1.2.3"}, "kernel ABI is 14 there, and not said here"),
        ({**FACTS, "stages": 2}, "stages is not said there, and 2 here"),
    ],
)
def test_other_facts_are_named_at_both_ends(listener, other, why):
    invitation = listener.invite("rank 1", FACTS)
    with pytest.raises(ConfigError, match=f"rank 0 at 127.*: {why}"):
        connect(invitation.ticket, other, purpose="rank 0")
    mirrored = why.replace("there", "THERE").replace("here", "there").replace("THERE", "here")
    with pytest.raises(ConfigError) as error:
        invitation.wait(SECONDS)
    assert str(error.value).startswith("rank 1 at 127.0.0.1:")
    assert sorted(mirrored.replace(",", "").split()) == sorted(
        str(error.value).partition(": ")[2].replace(",", "").split()
    )


HELLOS = {
    "cut": lambda peer, ticket: peer.hello(ticket)[:40],
    "cut in its header": lambda peer, ticket: peer.hello(ticket)[:7],
    "without a token": lambda peer, ticket: peer.frame(HELLO),
    "too long": lambda peer, ticket: peer.frame(HELLO, bytes(MAX_HELLO_BYTES + 1)),
    "another frame": lambda peer, ticket: peer.frame(MESSAGE, b"{}"),
    "words of a step": lambda peer, ticket: peer.frame(WORDS, b"1234"),
    "not the first": lambda peer, ticket: (peer.frame(HELLO), peer.hello(ticket))[1],
    "HTTP": lambda peer, ticket: b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("what", HELLOS)
def test_a_damaged_hello_ends_its_connection_alone(listener, caplog, what):
    invitation = listener.invite("rank 1", FACTS)
    with RawPeer(invitation.ticket) as peer:
        peer.send(HELLOS[what](peer, invitation.ticket))
        if what.startswith("cut"):
            peer.plain.shutdown(socket.SHUT_WR) if peer.plain.fileno() >= 0 else peer.close()
        else:
            assert peer.is_cut()
    assert logged(caplog, "a connection was ended")
    with connect(invitation.ticket, FACTS), invitation.wait(SECONDS):
        pass


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"octavo": []}', b'{"octavo": 1e999}', b"[" * 5000, b"\xff"]
)
def test_facts_that_cannot_be_read_are_refused(listener, text):
    invitation = listener.invite("rank 1", FACTS)
    with RawPeer(invitation.ticket) as peer:
        peer.send(peer.frame(HELLO, invitation.ticket.token + text))
        assert peer.is_cut()
    with pytest.raises((LinkError, ConfigError)):
        invitation.wait(SECONDS)
    assert lets_in(listener)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=200), in_tls=st.booleans())
def test_garbage_ends_its_connection_alone(listener, data, in_tls):
    invitation = listener.invite("rank 1", FACTS)
    if in_tls:
        with RawPeer(invitation.ticket) as peer:
            peer.send(data)
    else:
        address = (listener.address.host, listener.address.port)
        with socket.create_connection(address) as plain:
            plain.sendall(data)
    with connect(invitation.ticket, FACTS), invitation.wait(SECONDS):
        pass


def test_who_says_nothing_is_cut_and_nobody_waits_for_it(caplog):
    with Listener(patience=Patience(handshake_s=2.0)) as listener:
        address = (listener.address.host, listener.address.port)
        silent = socket.create_connection(address)
        slow = RawPeer(listener.invite("rank 2", FACTS).ticket)
        slow.send(b"\1")
        assert lets_in(listener)
        assert slow.is_cut()
        assert logged(caplog, "has not shown a token in 2 s")
        slow.close()
        silent.close()


def test_many_who_say_nothing_do_not_keep_others_out(listener):
    address = (listener.address.host, listener.address.port)
    silent = [socket.create_connection(address) for _ in range(2 * _MOST_UNKNOWN)]
    assert lets_in(listener)
    for each in silent:
        each.close()


def test_one_who_does_not_come_is_named(listener):
    invitation = listener.invite("rank 1", FACTS)
    with pytest.raises(ConfigError, match=r"rank 1 did not connect to 127.* in 0 seconds"):
        invitation.wait(0)
    link = connect(invitation.ticket, FACTS)  # too late: its link is closed
    link.start({})
    with pytest.raises(LinkError, match="closed the link|cut"):
        link.receive()
    link.close()


def test_a_closed_listener_ends_what_waits_but_no_link():
    with two_ends() as (ours, theirs):
        ours.start({MESSAGE: 100})
        theirs.start({MESSAGE: 100})
        theirs.send_message({"it": "goes on"})
        assert ours.receive_message() == {"it": "goes on"}
    listener = Listener()
    invitation = listener.invite("rank 1", FACTS)
    listener.close()
    listener.close()
    with pytest.raises(LinkError, match="rank 1: the listener was closed"):
        invitation.wait(SECONDS)
    with pytest.raises(LinkError, match="cannot be reached"):
        connect(invitation.ticket, FACTS)


def test_tokens_and_facts_have_their_place_in_a_hello(listener):
    """`RawPeer` sends the bytes that `connect` sends."""
    invitation = listener.invite("rank 1", FACTS)
    with RawPeer(invitation.ticket) as peer:
        peer.send(peer.hello(invitation.ticket))
        with invitation.wait(SECONDS):
            header = peer.tls.recv(16)
            assert header[:1] == OutgoingFrames().header(MESSAGE, 0)[:1]
            assert json.loads(peer.tls.recv(1000))["facts"].items() >= FACTS.items()
