"""From samples to one table: medians, ranges, and how many times faster octavo is."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from workloads import FIGURES, WORKLOADS, Figure


@dataclass
class Sample:
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
class Ratio:
    """How many times faster octavo is: by the medians over all rounds, and round by round."""

    of_medians: float
    by_round: list[float]

    def __str__(self) -> str:
        if not self.by_round:
            return f"{self.of_medians:.2f} ×"
        low, high = min(self.by_round), max(self.by_round)
        return f"{self.of_medians:.2f} × ({low:.2f} – {high:.2f})"


@dataclass
class Row:
    """One figure of one contender. ``ratios``: against each of octavo's contenders."""

    workload: str
    figure: str
    contender: str
    median: float
    min: float
    max: float
    num_samples: int
    ratios: dict[str, Ratio] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(samples: Iterable[Sample], ours: Sequence[str]) -> list[Row]:
    """Rows in the order of workloads and figures, then of contenders as they were first measured.

    ``ours``: the contenders whose lead over each other contender is wanted.
    """
    by_workload: dict[str, dict[str, dict[int, Sample]]] = {}
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
    figure: Figure,
    name: str,
    values: Mapping[str, Mapping[int, float]],
    ours: Sequence[str],
) -> Row:
    of_all = list(values[name].values())
    median, low, high = statistics.median(of_all), min(of_all), max(of_all)
    row = Row(workload, figure.name, name, median, low, high, len(of_all))
    if name not in ours:
        row.ratios = {
            our: _ratio(values[our], values[name], figure) for our in ours if our in values
        }
    return row


def _ratio(ours: Mapping[int, float], theirs: Mapping[int, float], figure: Figure) -> Ratio:
    def faster(our: float, their: float) -> float:
        return our / their if figure.higher_is_better else their / our

    of_medians = faster(statistics.median(ours.values()), statistics.median(theirs.values()))
    return Ratio(of_medians, [faster(ours[n], theirs[n]) for n in sorted(ours) if n in theirs])


def table(rows: Sequence[Row], weights: Mapping[str, str], ours: Sequence[str]) -> Table:
    """``weights``: by contender. A column for the lead of each of ours that was measured."""
    measured = [our for our in ours if any(row.contender == our for row in rows)]
    result = Table(title="medians over the rounds (minimum – maximum)", title_justify="left")
    for heading in ("workload", "figure", "engine", "weights"):
        result.add_column(heading, no_wrap=heading != "workload")
    for heading in ("median", "range"):
        result.add_column(heading, justify="right", no_wrap=True)
    for our in measured:
        result.add_column(f"octavo {weights[our]} is faster by", justify="right")
    previous = ("", "")
    for row in rows:
        place = (row.workload, row.figure)
        if previous != ("", "") and place != previous:
            result.add_section()
        workload = WORKLOADS[row.workload]
        figure = next(f for f in FIGURES[workload.kind] if f.name == row.figure)
        is_new = place != previous
        result.add_row(
            workload.title if is_new and row.workload != previous[0] else "",
            figure.title if is_new else "",
            row.contender.partition(":")[0],
            weights[row.contender],
            _number(row.median),
            f"{_number(row.min)} – {_number(row.max)}" if row.num_samples > 1 else "",
            *(str(row.ratios[our]) if our in row.ratios else "" for our in measured),
        )
        previous = place
    return result


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# A probe of bandwidth that differs by more from its neighbour, and more of a processor in use by
# others, make a sample doubtful.
MOVED = 0.25
OTHERS_BUSY = 0.1


def doubts(sample: Sample) -> list[str]:
    """What speaks against a sample, a line each."""
    found = []
    before, after = sample.bandwidth_before, sample.bandwidth_after
    if before and after and abs(after - before) > MOVED * min(before, after):
        found.append(f"memory bandwidth moved from {before:.0f} to {after:.0f} GB/s")
    if sample.other_cpus is not None and sample.other_cpus > OTHERS_BUSY:
        found.append(f"other processes kept {sample.other_cpus:.1f} processors busy")
    return found
