"""The number of replicas of a server, or the least and the most of replicas that come and go."""

from __future__ import annotations

import re
from typing import NamedTuple

from octavo.base.errors import ConfigError

_RANGE = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?")


class ReplicaRange(NamedTuple):
    """The fewest and the most replicas at once. A server starts with the fewest."""

    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        """True if replicas come and go."""
        return self.least < self.most


def parse_replicas(value: int | str) -> ReplicaRange:
    """Return the range of ``data_parallel_size``: ``3``, ``"3"`` or ``"1..8"``.

    Raises:
        ConfigError: it is no such number or range.
    """
    found = _RANGE.fullmatch(str(value)) if isinstance(value, int | str) else None
    if found is None or isinstance(value, bool) or int(found[1]) < 1:
        raise ConfigError(
            "data_parallel_size must be an integer of at least 1, or the least and the most "
            f"replicas as 1..8, not {value!r}"
        )
    least = int(found[1])
    most = int(found[2] or least)
    if most < least:
        raise ConfigError(f"data_parallel_size {value}: write the lower number first")
    return ReplicaRange(least, most)
