"""Limits of connections, and of memory for bodies, which clients share.

An address is a whole network where IPv6 gives one to each client. One address alone cannot have all
of either, so that something is left for others.
"""

from __future__ import annotations

from collections import Counter

from octavo.base.errors import QueueFullError

FREE_BYTES = 64 << 10  # of each body, not counted: the number of connections bounds them
_SHARE_OF_ONE = 2  # an address may have the memory divided by this


class ConnectionCounts:
    """Number of connections of each address."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, address: str) -> int:
        """Count one more connection of an address; return how many it has."""
        self._counts[address] += 1
        return self._counts[address]

    def remove(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


class BodyMemory:
    """Memory for the bodies of requests, from their first byte to the end of their answers.

    Args:
        num_bytes: for all of them together.
    """

    def __init__(self, num_bytes: int):
        self._total = num_bytes
        self._taken: Counter[str] = Counter()  # by address

    def open(self, address: str) -> BodyAllocation:
        """Return the allocation of one body, empty so far."""
        return BodyAllocation(self, address)

    def take(self, address: str, num_bytes: int) -> None:
        """Allocate bytes for an address, or raise QueueFullError and allocate none."""
        taken = self._taken.total()
        if taken + num_bytes > self._total:
            raise QueueFullError("the bodies of other requests take all memory set aside", 2.0)
        if self._taken[address] + num_bytes > self._total // _SHARE_OF_ONE:
            raise QueueFullError("the bodies of your other requests take all your memory", 2.0)
        self._taken[address] += num_bytes

    def give_back(self, address: str, num_bytes: int) -> None:
        self._taken[address] -= num_bytes
        if self._taken[address] <= 0:
            del self._taken[address]


class BodyAllocation:
    """The part of a ``BodyMemory`` that one body has. Close it when the request is over."""

    def __init__(self, memory: BodyMemory, address: str):
        self._memory, self._address = memory, address
        self._num_bytes = self._num_taken = 0

    def add(self, num_bytes: int) -> None:
        """Allocate for more bytes of the body. QueueFullError if there is no memory for them."""
        self._num_bytes += num_bytes
        wanted = max(0, self._num_bytes - FREE_BYTES) - self._num_taken
        if wanted > 0:
            self._memory.take(self._address, wanted)
            self._num_taken += wanted

    def close(self) -> None:
        if self._num_taken:
            self._memory.give_back(self._address, self._num_taken)
            self._num_taken = 0
