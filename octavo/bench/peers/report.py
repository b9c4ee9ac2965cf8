"""Medians and ranges of samples, and how many times faster octavo is."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.bench.noise import OTHERS_BUSY, has_moved
from octavo.bench.peers.workers.workloads import FIGURES, WORKLOADS, PeerFigure


@dataclass
class TurnSample:
    """One workload, one contender, one round. ``repeats``: the figures of each repetition."""

    round: int
    workload: str
    contender: str
    repeats: list[dict[str, float]]
    elapsed_s: float = 0.0
    bandwidth_before: float | None = None  # GB/s
    bandwidth_after: float | None = None
    other_cpus: float | None = None  # processors that something else kept busy

    def figure(self, name: str) -> float:
        return statistics.median(repeat[name] for repeat in self.repeats)


@dataclass(frozen=True)
class SpeedRatio:
    """Number of times that octavo is faster: by the medians over all rounds, and round by round."""

    of_medians: float
    by_round: list[float]

    def __str__(self) -> str:
        if len(self.by_round) < 2:
            return f"{self.of_medians:.2f} ×"
        low, high = min(self.by_round), max(self.by_round)
        return f"{self.of_medians:.2f} × ({low:.2f} – {high:.2f})"


@dataclass
class ComparisonRow:
    """One figure of one contender. ``ratios``: against each of octavo's contenders."""

    workload: str
    figure: str
    contender: str
    median: float
    min: float
    max: float
    num_samples: int
    ratios: dict[str, SpeedRatio] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(samples: Iterable[TurnSample], ours: Sequence[str]) -> list[ComparisonRow]:
    """Return rows in the order of workloads and figures, then of contenders as they were first
    measured.

    ``ours``: the contenders whose ratio to each other contender is wanted.
    """
    by_workload: dict[str, dict[str, dict[int, TurnSample]]] = {}
    for sample in samples:
        if sample.repeats:
            contenders = by_workload.setdefault(sample.workload, {})
            contenders.setdefault(sample.contender, {})[sample.round] = sample
    rows = []
    for workload in WORKLOADS.values():
        contenders = by_workload.get(workload.name, {})
        for figure in FIGURES[workload.kind]:
            values = {
                name: {number: sample.figure(figure.name) for number, sample in rounds.items()}
                for name, rounds in contenders.items()
            }
            rows += [_row(workload.name, figure, name, values, ours) for name in values]
    return rows


def _row(
    workload: str,
    figure: PeerFigure,
    name: str,
    values: Mapping[str, Mapping[int, float]],
    ours: Sequence[str],
) -> ComparisonRow:
    of_all = list(values[name].values())
    median, low, high = statistics.median(of_all), min(of_all), max(of_all)
    row = ComparisonRow(workload, figure.name, name, median, low, high, len(of_all))
    if name not in ours:
        row.ratios = {
            our: _ratio(values[our], values[name], figure) for our in ours if our in values
        }
    return row


def _ratio(
    ours: Mapping[int, float], theirs: Mapping[int, float], figure: PeerFigure
) -> SpeedRatio:
    def faster(our: float, their: float) -> float:
        return our / their if figure.higher_is_better else their / our

    of_medians = faster(statistics.median(ours.values()), statistics.median(theirs.values()))
    return SpeedRatio(of_medians, [faster(ours[n], theirs[n]) for n in sorted(ours) if n in theirs])


def doubts(sample: TurnSample) -> list[str]:
    """Return reasons to doubt a sample, a line each."""
    found = []
    before, after = sample.bandwidth_before, sample.bandwidth_after
    if before and after and has_moved(before, after):
        found.append(f"memory bandwidth moved from {before:.0f} to {after:.0f} GB/s")
    if sample.other_cpus is not None and sample.other_cpus > OTHERS_BUSY:
        found.append(f"other processes kept {sample.other_cpus:.1f} processors busy")
    return found
