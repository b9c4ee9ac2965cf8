"""Passes KV on between replicas over links, in the process of one of them.

Who computes prompts invites a reader, and who answers connects with the ticket: the server carries
it from one to the other, and asks for the next one when a link has ended::

    server     invite(replica)  ->  prefill replica    returns a ticket
    server     connect(replica, ticket)  ->  decode replica
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from octavo.base.errors import ConfigError, OctavoError
from octavo.links.facts import Facts
from octavo.links.handshake import connect
from octavo.links.ticket import parse_ticket
from octavo.offload.block_server import ServedBlocks
from octavo.offload.linked_blocks import LinkedBlocks
from octavo.offload.open_peers import KVContent, Transfer, room_for_blocks
from octavo.offload.peer_storage import PeerStorage
from octavo.offload.shared_blocks import slots_that_fit

_log = logging.getLogger("octavo")

# Seconds from the end of a link until another one is asked for: twice as many after each failure.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class TransferLinks(Transfer):
    """The links of a replica. ``invite`` and ``connect`` are called after ``open``.

    Args:
        own_host: the address of this machine on which a replica that computes prompts is reached;
            None for one that does not.
        peers: the numbers of the replicas that compute prompts for this one.
        num_bytes: of the blocks that one of them keeps.
    """

    def __init__(self, own_host: str | None, peers: Sequence[int], num_bytes: int):
        self._own_host, self._num_bytes = own_host, num_bytes
        self._numbers = peers
        self._own: ServedBlocks | None = None
        self._peers: dict[int, LinkedBlocks] = {}
        self._facts: Facts = {}
        self._lock = threading.Lock()
        self._pauses: dict[int, float] = {}  # by replica
        self._when_lost: Callable[[int], object] = lambda _: None

    def open(self, rows: Sequence[memoryview], content: KVContent) -> PeerStorage:
        """See `Transfer.open`."""
        size = len(rows[0])
        self._facts = {"purpose": "KV of a replica", "bytes of a block": size, **content.facts()}
        identity = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).digest()
        with room_for_blocks():
            if self._own_host is not None:
                self._own = ServedBlocks(
                    self._own_host, self._num_bytes, size, identity, self._facts
                )
        most_names = max(1, slots_that_fit(self._num_bytes, size))
        self._peers = {
            number: LinkedBlocks(size, most_names, partial(self._lose, number))
            for number in self._numbers
        }
        return PeerStorage(rows, identity, self._own, self._peers)

    def when_lost(self, callback: Callable[[int], object]) -> None:
        """Have ``callback`` called with the number of a replica, in any thread, a while after its
        link has ended, or could not be made."""
        self._when_lost = callback

    def invite(self, replica: int) -> str | None:
        """Return the ticket by which a replica may connect to this one; None if this one computes
        no prompts."""
        return None if self._own is None else self._own.invite(f"replica {replica}")

    def connect(self, replica: int, ticket: str) -> None:
        """Begin to connect to a replica that computes prompts."""
        if replica in self._peers:
            threading.Thread(
                target=self._connect, args=(replica, ticket), name="octavo-kv-link", daemon=True
            ).start()

    def is_linked(self, replica: int) -> bool:
        """Return whether this one is connected to a replica that computes prompts."""
        return replica in self._peers and self._peers[replica].is_open

    def _connect(self, replica: int, ticket: str) -> None:
        try:
            link = connect(parse_ticket(ticket), self._facts, purpose=f"replica {replica}")
        except ConfigError as error:  # of what does not change while both run
            _log.warning("the KV of replica %d is not read: %s", replica, error)
        except OctavoError as error:
            self._lose(replica, error)
        else:
            with self._lock:
                self._pauses.pop(replica, None)
            self._peers[replica].join(link)

    def _lose(self, replica: int, why: OctavoError) -> None:
        with self._lock:
            pause = self._pauses.get(replica, _FIRST_PAUSE)
            self._pauses[replica] = min(2 * pause, _LONGEST_PAUSE)
        timer = threading.Timer(pause, self._report, [replica, why])
        timer.daemon = True
        timer.start()

    def _report(self, replica: int, why: OctavoError) -> None:
        """Say that a replica is not linked, unless it has been meanwhile. When a server ends, so do
        its replicas before that."""
        if not self._peers[replica].is_open:
            _log.warning("the KV of replica %d does not come until it is reached: %s", replica, why)
            self._when_lost(replica)
