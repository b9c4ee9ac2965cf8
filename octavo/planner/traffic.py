"""The lengths, rate and number of requests of a deployment."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that are all alike.

    Args:
        input_len, output_len: tokens of a prompt and of its answer.
        rate: Poisson arrivals per second, however many are under way. None: there are
            ``concurrency`` requests, which begin together.
        concurrency: the most requests that are answered at once; others wait. Without rate and
            concurrency there is one.

    Raises:
        ConfigError: a figure is out of range.
    """

    input_len: int = 512
    output_len: int = 128
    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be 1 or more, not {value}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"rate must be above 0 requests a second, not {self.rate}")

    @property
    def total_len(self) -> int:
        return self.input_len + self.output_len

    def share(self, replicas: int) -> Traffic:
        """Return the traffic of one of ``replicas`` copies. Of requests that begin together, that
        of the copy with the most."""
        rate = None if self.rate is None else self.rate / replicas
        concurrency = None if self.concurrency is None else math.ceil(self.concurrency / replicas)
        return Traffic(self.input_len, self.output_len, rate, concurrency)
