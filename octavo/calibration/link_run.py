"""Measures the link to another machine, or over the loopback of this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from octavo.base.errors import ConfigError, LinkError
from octavo.base.files import replace_file
from octavo.cost.networks import Network, network_file
from octavo.links.echo import ECHO_FACTS, measure, send_back
from octavo.links.handshake import connect
from octavo.links.link import Link
from octavo.links.listener import LOOPBACK, Listener
from octavo.links.ticket import Address, Ticket
from octavo.system.child_process import environment_without_keys

LOOPBACK_NAME = "loopback"
_SECONDS_TO_START = 60.0
# A person carries the ticket to another machine meanwhile.
_SECONDS_TO_CARRY = 1800.0


def measure_loopback() -> Network:
    """Measure a link between this process and one that it starts: what TLS and two processes take,
    without a network.

    Raises:
        ConfigError: the other process does not come up. LinkError: it has ended.
    """
    with Listener(LOOPBACK) as listener:
        invitation = listener.invite("the process that sends back", ECHO_FACTS)
        with subprocess.Popen(
            [sys.executable, "-m", "octavo.links.echo"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment_without_keys(),
        ) as process:
            assert process.stdin is not None
            try:
                process.stdin.write(invitation.ticket.secret_text().encode() + b"\n")
                process.stdin.close()
                with invitation.wait(_SECONDS_TO_START) as link:
                    return _measured(link, LOOPBACK_NAME)
            finally:
                process.kill()


def measure_to(ticket: Ticket) -> Network:
    """Measure the link to the machine whose `serve_one` has made a ticket; it has the name of that
    machine.

    Raises:
        ConfigError, LinkError: as of `connect`; or the link has ended.
    """
    with connect(ticket, ECHO_FACTS) as link:
        return _measured(link, ticket.address.host)


def serve_one(address: Address, show: Callable[[Ticket], None]) -> str:
    """Wait for one process that measures, and send back what it sends; returns who that was.

    Args:
        show: given the ticket that the other one needs.

    Raises:
        ConfigError: the address cannot be listened on, or nothing has come within half an hour.
        LinkError: the link was cut.
    """
    with Listener(address) as listener:
        invitation = listener.invite("the machine that measures", ECHO_FACTS)
        show(invitation.ticket)
        with invitation.wait(_SECONDS_TO_CARRY) as link:
            send_back(link)
            return link.peer


def keep(network: Network) -> Path:
    """Write what was measured in the place of an older one, where plans find it; return the path.
    ConfigError if it cannot be written."""
    path = network_file(network.name)
    try:
        replace_file(path, (json.dumps(network.as_json(), indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def _measured(link: Link, name: str) -> Network:
    try:
        times = measure(link)
    except LinkError as error:
        raise LinkError(f"the link has ended while it was measured: {error}") from error
    return Network(
        name=name,
        latency_s=times.latency_s,
        latency_p99_s=times.latency_p99_s,
        bandwidth=times.bandwidth,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
