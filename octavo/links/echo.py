"""Measurement of a link: one end sends frames back, the other one times them.

    python -m octavo.links.echo        connects by the ticket on standard input, and sends back

A frame of PROBE comes back whole if its first byte is 0, and as 8 bytes otherwise: so round trips
of small frames say how long a message is on its way, and long frames with short answers how many
bytes a second go one way.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.base.errors import LinkError, OctavoError
from octavo.links.frames import PROBE
from octavo.links.handshake import connect
from octavo.links.link import Frame, Link
from octavo.links.ticket import receive_ticket

ECHO_FACTS = {"purpose": "measuring a link"}
# A message of a decoding step, and hidden states of prompts.
_SMALL_BYTES, _LARGE_BYTES = 256, (1 << 20, 4 << 20)
_ANSWER_BYTES = 8
_LIMITS = {PROBE: _LARGE_BYTES[-1]}


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The times of a link, one way.

    Args:
        latency_s: of a small frame, median and the one that 99 of 100 do not exceed.
        bandwidth: bytes a second of long frames, behind the latency.
        num_round_trips: that were timed.
    """

    latency_s: float
    latency_p99_s: float
    bandwidth: float
    num_round_trips: int


def send_back(link: Link) -> None:
    """Send back what comes, until the other end closes the link. LinkError if it is cut."""

    def answer(frame: Frame) -> None:
        whole = len(frame.data) == 0 or frame.data[0] == 0
        link.send(PROBE, frame.data if whole else frame.data[:_ANSWER_BYTES])

    link.start(_LIMITS, answer)
    try:
        link.receive()  # nothing is left to receive: it waits for the end
    except LinkError as error:
        if "has closed the link" not in str(error):
            raise


def measure(link: Link, seconds: float = 3.0) -> LinkTimes:
    """Time a link at whose other end is `send_back`, for about so many seconds.

    LinkError if it ends meanwhile.
    """
    link.start(_LIMITS)
    small = bytes(_SMALL_BYTES)
    _round_trips(link, small, seconds / 10)  # the first ones start threads and fill caches
    trips = sorted(_round_trips(link, small, seconds / 2))
    latency = statistics.median(trips) / 2
    rates = []
    for size in _LARGE_BYTES:
        data = b"\1" + bytes(size - 1)
        took = statistics.median(_round_trips(link, data, seconds / 5))
        rates.append(size / max(took - 2 * latency, took / 100))
    return LinkTimes(latency, trips[len(trips) * 99 // 100] / 2, max(rates), len(trips))


def _round_trips(link: Link, data: bytes, seconds: float) -> Sequence[float]:
    """Return the seconds of each round trip, of which there are three at least."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        link.send(PROBE, data)
        link.receive()
        times.append(time.perf_counter() - begin)
    return times


def main() -> int:
    """Send back what comes by the ticket on standard input; returns the exit status."""
    try:
        with connect(receive_ticket(), ECHO_FACTS) as link:
            send_back(link)
    except OctavoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
