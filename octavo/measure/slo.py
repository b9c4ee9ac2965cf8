"""Limits of the latencies of a request, and the goodput and attainment of a run within them.

Goodput is that of Zhong et al. ("DistServe", OSDI 2024): requests within the limits, per second.
Attainment is their share of all requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.options import SECONDS_OF
from octavo.measure.request_record import RequestRecord
from octavo.measure.statistics import wilson_interval

LIMITS = ("ttft", "tpot", "e2el")
_EXAMPLE = "write ttft:200 tpot:50 e2el:5000, in milliseconds"


@dataclass(frozen=True, slots=True)
class RequestSlo:
    """Limits of a request in seconds; None where there is none. All must be met."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> RequestSlo | None:
        """Parse ``ttft:200``, ``tpot=50ms``, ``e2el:5s``, apart or joined by commas; None without
        any.

        Raises:
            ConfigError: one is no such limit, or comes twice.
        """
        limits: dict[str, float] = {}
        for text in re.split(r"[,\s]+", " ".join(texts).strip()):
            if not text:
                continue
            name, limit = _parse_limit(text)
            if name in limits:
                raise ConfigError(f"goodput: {name} is limited twice; {_EXAMPLE}")
            limits[name] = limit
        return cls(**limits) if limits else None

    def met_limits(self, record: RequestRecord, from_scheduled: bool = False) -> dict[str, bool]:
        """Return, for each limit, whether a completed request met it; a failed one met none.

        An answer of one token has no TPOT, which counts as 0.
        """
        limits = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        if not record.completed:
            return dict.fromkeys(limits, False)
        delay = record.delay if from_scheduled else 0.0
        times = {
            "ttft": record.ttft + delay,
            "tpot": record.tpot or 0.0,
            "e2el": record.e2el + delay,
        }
        return {name: times[name] <= limit for name, limit in limits.items()}

    def as_json(self) -> dict[str, float]:
        """Return the limits in milliseconds."""
        values = {name: getattr(self, name) for name in LIMITS}
        return {f"{name}_ms": value * 1e3 for name, value in values.items() if value is not None}


def _parse_limit(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"([a-z0-9]+)[:=](\d+(?:\.\d*)?|\.\d+)(ms|s|)", text.lower())
    if match is None:
        raise ConfigError(f"goodput: {text!r} is no limit: {_EXAMPLE}")
    name = "e2el" if match[1] == "e2e" else match[1]
    if name not in LIMITS:
        raise ConfigError(f"goodput: {match[1]!r} is none of {', '.join(LIMITS)}: {_EXAMPLE}")
    limit = float(match[2]) * SECONDS_OF[match[3]]
    if limit <= 0:
        raise ConfigError(f"goodput: {text!r}: a limit is above 0")
    return name, limit


@dataclass(frozen=True, slots=True)
class Attainment:
    """Number of requests that met a limit, or all of them, with a 95 % interval (Wilson)."""

    good: int
    requests: int
    interval: tuple[float, float]

    @classmethod
    def of(cls, good: int, requests: int) -> Attainment:
        return cls(good, requests, wilson_interval(good, requests))

    @property
    def share(self) -> float | None:
        return self.good / self.requests if self.requests else None

    def as_json(self) -> dict[str, Any]:
        return {
            "good": self.good,
            "requests": self.requests,
            "share": self.share,
            "interval": list(self.interval),
        }


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests and tokens within the limits. Rates are per second of the run."""

    slo: RequestSlo
    request_goodput: float
    token_goodput: float
    attainment: Attainment
    attainment_by_limit: dict[str, Attainment]

    def as_json(self) -> dict[str, Any]:
        return {
            "request_goodput": self.request_goodput,
            "output_token_goodput": self.token_goodput,
            "attainment": self.attainment.as_json(),
            "attainment_by_limit": {
                name: each.as_json() for name, each in self.attainment_by_limit.items()
            },
        }


def goodput(
    records: Sequence[RequestRecord],
    slo: RequestSlo,
    duration: float,
    *,
    from_scheduled: bool = False,
) -> Goodput:
    """Return the goodput of the requests that have ended; those that an interruption cut off are
    left out.

    Args:
        duration: of the run, in seconds.
        from_scheduled: measure TTFT and E2EL from when a request should have been sent, as in
            MLPerf, so that waiting in the load generator counts.
    """
    ended = [record for record in records if not record.unfinished]
    met = [slo.met_limits(record, from_scheduled) for record in ended]
    good = [record for record, each in zip(ended, met, strict=True) if all(each.values())]

    def attained(is_met: Callable[[dict[str, bool]], bool]) -> Attainment:
        return Attainment.of(sum(map(is_met, met)), len(met))

    return Goodput(
        slo,
        request_goodput=len(good) / duration if duration else 0.0,
        token_goodput=sum(record.output_tokens for record in good) / duration if duration else 0.0,
        attainment=attained(lambda each: all(each.values())),
        attainment_by_limit={
            name: attained(lambda each, name=name: each[name])  # type: ignore[misc]
            for name in LIMITS
            if getattr(slo, name) is not None
        },
    )
