"""Outages of replicas, at given times."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from octavo.base.errors import ConfigError

_WRITTEN = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Outage:
    """A failure of a replica, which comes back with an empty cache. Its requests are sent again."""

    replica: int
    at_s: float
    lasts_s: float = math.inf

    @classmethod
    def read(cls, text: str) -> Outage:
        """Parse ``0@30``, or ``0@30+10`` for an outage of ten seconds; else ConfigError."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ConfigError(f"fail: {text!r} is no outage: write 0@30, or 0@30+10 for 10 seconds")
        replica, at_s, lasts_s = match.groups()
        return cls(int(replica), float(at_s), math.inf if lasts_s is None else float(lasts_s))
