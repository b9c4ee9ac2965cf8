"""The engine process of a replica that a placement has started, maybe on another machine.

    python -m octavo.server.engine.hosted_worker RECORD LOG_FORMAT

``RECORD`` is a file descriptor of the memory of an `InFlightRecord`. The first line of standard
input is the ticket by which it connects to the server. When the server closes the link, or the end
of standard input says that the host has gone, the process ends at once.
"""

from __future__ import annotations

import os
import sys
import threading

from octavo.base.errors import OctavoError
from octavo.links.facts import Facts
from octavo.links.handshake import connect
from octavo.links.stream import LinkStream
from octavo.links.ticket import receive_ticket
from octavo.runtime.rank_facts import software_facts
from octavo.server.engine.in_flight_record import InFlightRecord
from octavo.server.engine.worker import prepare_process, serve

# The server and the engine must have these in common.
FACTS: Facts = {"purpose": "engine of a replica", **software_facts()}


def main(record_fd: int, log_format: str) -> int:
    """Connect to the server and serve it; returns the exit status."""
    prepare_process(log_format)
    ticket = receive_ticket()
    threading.Thread(target=_end_with_host, daemon=True).start()
    try:
        link = connect(ticket, FACTS, purpose="the server")
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    return serve(LinkStream(link), InFlightRecord.open(record_fd), link.local_host)


def _end_with_host() -> None:
    while os.read(0, 1 << 12):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
