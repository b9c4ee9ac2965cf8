"""Limits of latency over all requests, as a user writes them: ``ttft=500,tpot=50,e2e=10s@p99``.

A limit is of a percentile of all requests, or of their mean. How many requests of a run keep such
limits is computed in `octavo.measure.slo`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from octavo.base.errors import ConfigError
from octavo.base.options import SECONDS_OF

METRICS = ("ttft", "tpot", "e2e")
MEAN = "mean"

_OTHER_NAMES = {"itl": "tpot", "e2el": "e2e"}
_LIMIT = re.compile(
    r"(?P<metric>[a-z0-9]+?)(_(?P<before>mean|p\d+(\.\d+)?))?\s*[=:]\s*"
    r"(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>ms|s|)(@(?P<after>mean|p\d+(\.\d+)?))?"
)
_EXAMPLE = "write ttft=500,tpot=50,e2e=10s@p99 or ttft_p99=500,tpot_p50=40ms"

# Milliseconds to the first token, and between tokens, of MLPerf Inference's server scenarios, which
# 99 of 100 answers must keep (inference_policies, and mlperf.conf of the load generator).
_MLPERF = {
    "llama-2-70b": (2000, 200),
    "llama-2-70b-interactive": (450, 40),
    "mixtral-8x7b": (2000, 200),
    "llama-3.1-405b": (6000, 175),
    "llama-3.1-405b-interactive": (4500, 80),
    "llama-3.1-8b": (2000, 100),
    "llama-3.1-8b-interactive": (500, 30),
    "deepseek-r1": (2000, 80),
    "deepseek-r1-interactive": (1500, 15),
    "gpt-oss-120b": (3000, 80),
    "gpt-oss-120b-interactive": (2000, 20),  # the rules' figure; mlperf.conf has 15
}


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of one metric. ``metric``: ttft, tpot or e2e. ``percentile``: of all requests, None
    for their mean."""

    metric: str
    seconds: float
    percentile: float | None = 99.0

    @property
    def latency(self) -> str:
        """Name of its metric in `octavo.measure.metrics.LATENCIES`."""
        return "e2el" if self.metric == "e2e" else self.metric

    @property
    def name(self) -> str:
        """Name of the limit, such as ``ttft_p99``."""
        of = MEAN if self.percentile is None else f"p{self.percentile:g}"
        return f"{self.metric}_{of}"


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits, all of which are to be kept.

    Raises:
        ConfigError: one is given twice, or they contradict each other.
    """

    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for limit in self.limits:
            if limit.name in seen:
                raise ConfigError(f"slo: {limit.name} is limited twice")
            seen.add(limit.name)
        self._check_percentiles()
        self._check_whole_and_part()

    def __iter__(self) -> Iterator[Limit]:
        return iter(self.limits)

    def as_json(self) -> dict[str, float]:
        return {f"{limit.name}_ms": limit.seconds * 1e3 for limit in self.limits}

    def _check_percentiles(self) -> None:
        """Raise ConfigError if a limit of more requests is stricter than one of fewer."""
        by_metric: dict[str, list[tuple[float, Limit]]] = defaultdict(list)
        for limit in self.limits:
            if limit.percentile is not None:
                by_metric[limit.metric].append((limit.percentile, limit))
        for limits in by_metric.values():
            ordered = [limit for _, limit in sorted(limits, key=lambda pair: pair[0])]
            for fewer, more in pairwise(ordered):
                if more.seconds < fewer.seconds:
                    raise ConfigError(
                        f"slo: {more.name} = {more.seconds * 1e3:g} ms contradicts {fewer.name} = "
                        f"{fewer.seconds * 1e3:g} ms, which would say nothing: leave one out"
                    )

    def _check_whole_and_part(self) -> None:
        """Raise ConfigError if an answer would have to end before its first token."""
        parts = {limit.percentile: limit for limit in self.limits if limit.metric == "ttft"}
        for whole in self.limits:
            part = parts.get(whole.percentile)
            if whole.metric == "e2e" and part is not None and whole.seconds < part.seconds:
                raise ConfigError(
                    f"slo: {whole.name} = {whole.seconds * 1e3:g} ms contradicts {part.name} = "
                    f"{part.seconds * 1e3:g} ms: an answer ends after its first token"
                )


def parse_slo(text: str) -> Slo:
    """Parse limits joined by commas, in milliseconds unless they say ``s``, or the name of a
    preset: see `presets`.

    ``@p95`` holds for its limit and those before it that have none of their own; without one, a
    limit is of the 99th percentile.

    Raises:
        ConfigError: the text cannot be parsed, or its limits contradict each other.
    """
    text = text.strip().lower()
    if text in presets():
        return presets()[text]
    if text.startswith("mlperf:"):
        from difflib import get_close_matches

        near = get_close_matches(text, presets(), 3, 0.3) or sorted(presets())
        raise ConfigError(f"slo: no preset {text!r}; there is {', '.join(near)}")
    limits: list[Limit] = []
    percentile: float | None = 99.0
    for part in reversed([part for part in re.split(r"[,\s]+", text) if part]):
        match = _LIMIT.fullmatch(part)
        if match is None:
            raise ConfigError(f"slo: {part!r} is no limit; {_EXAMPLE}")
        if match["before"] and match["after"]:
            raise ConfigError(f"slo: {part!r} says twice of what it is; {_EXAMPLE}")
        if match["after"]:
            percentile = _percentile(match["after"], part)
        own = _percentile(match["before"], part) if match["before"] else percentile
        limits.append(Limit(_metric(match["metric"]), _seconds(match, part), own))
    if not limits:
        raise ConfigError(f"slo: nothing is limited; {_EXAMPLE}")
    return Slo(tuple(reversed(limits)))


def presets() -> Mapping[str, Slo]:
    """Return the limits of MLPerf Inference, by names such as
    ``mlperf:llama-2-70b-interactive``."""
    return _PRESETS


def _metric(name: str) -> str:
    metric = _OTHER_NAMES.get(name, name)
    if metric not in METRICS:
        raise ConfigError(f"slo: {name!r} is none of {', '.join(METRICS)}; {_EXAMPLE}")
    return metric


def _seconds(match: re.Match[str], part: str) -> float:
    seconds = float(match["number"]) * SECONDS_OF[match["unit"]]
    if seconds <= 0:
        raise ConfigError(f"slo: {part!r}: a limit is above 0")
    return seconds


def _percentile(text: str, part: str) -> float | None:
    if text == MEAN:
        return None
    percentile = float(text[1:])
    if not 0 < percentile < 100:
        raise ConfigError(f"slo: {part!r}: a percentile is between 0 and 100")
    return percentile


_PRESETS = MappingProxyType(
    {
        f"mlperf:{name}": Slo((Limit("ttft", ttft / 1e3), Limit("tpot", tpot / 1e3)))
        for name, (ttft, tpot) in _MLPERF.items()
    }
)
