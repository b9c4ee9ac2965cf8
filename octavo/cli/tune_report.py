"""Output of ``octavo tune``: a table, a reason, a picture, a config file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import terminal
from octavo.cli.bench import common
from octavo.cli.tune_flags import Question

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from octavo.bench.record import Recorder
    from octavo.tuning.explain import TuningDecision
    from octavo.tuning.live_confirmation import LiveRuns
    from octavo.tuning.outcome import LoadOutcome
    from octavo.tuning.search import JudgedCandidate, SearchResult


@dataclass(frozen=True)
class Result:
    """``live`` is None where nothing was run."""

    found: SearchResult
    live: LiveRuns | None
    decision: TuningDecision

    def as_json(self, question: Question) -> dict[str, Any]:
        from octavo.tuning.explain import why

        best, measured = self.decision.best, self.decision.measured
        front = {each.candidate for each in self.found.pareto}
        return {
            "best": {**question.held, **best.settings},
            "predicted": self.decision.predicted.as_json(),
            "measured": measured[best].as_json() if measured else None,
            "tried": [
                {**each.as_json(), "pareto": each.candidate in front} for each in self.found.tried
            ],
            "why": why(self.decision),
            "slo": question.slo.as_json(),
            "live": [] if self.live is None else self.live.as_json(),
            "config": str(question.out),
        }


def write_config(question: Question, decision: TuningDecision) -> None:
    """BenchmarkError if the file cannot be written."""
    from octavo.measure.results import write_text
    from octavo.system import machine
    from octavo.tuning.config_text import config_text
    from octavo.tuning.explain import why

    settings = {"model": question.model, **question.held, **decision.best.settings}
    settings["model"] = _from_anywhere(settings["model"])
    where = machine.cpu().model if question.is_here else f"a simulated {question.hardware}"
    when = datetime.now(UTC).isoformat(timespec="seconds")
    limits = ", ".join(f"{limit.name} {limit.seconds * 1e3:g} ms" for limit in question.slo)
    notes = [f"octavo tune, {when}, on {where}, for {limits}", why(decision)]
    write_text(question.out, config_text(question.out, settings, notes))


def _from_anywhere(model: str) -> str:
    """A model as it is found from any folder."""
    from octavo.hub import CATALOG

    path = Path(model).expanduser()
    return str(path.absolute()) if model not in CATALOG and path.exists() else model


def tell(
    args: argparse.Namespace, question: Question, result: Result, recorder: Recorder | None
) -> None:
    """Write the result to stdout, ``--output`` and ``--plot``."""
    document = result.as_json(question)
    if recorder is not None:
        document["run"] = recorder.as_json()

    def show(console: Console) -> None:
        _print(console, result)

    common.report(args, document, show, lambda: _figure(args.model, result))
    terminal.say(f"written: octavo serve --config {question.out}")


def _print(console: Console, result: Result) -> None:
    from octavo.tuning.explain import why

    head = ("settings", "requests", *_HEAD)
    finalists, tried = result.found.finalists, result.found.tried
    rows = [_searched(each) for each in finalists]
    common.print_figures(console, "simulated: the best, and the defaults", head, rows)
    console.print(f"{len(tried)} settings were tried; --json has all of them", style="dim")
    if result.live is not None:
        common.print_figures(console, "live", ("settings", "", *_HEAD), list(_lived(result.live)))
    console.print(why(result.decision), markup=False)


_HEAD = ("requests/s", "within limits", "tightest limit used", "which", "tokens/s")


def _searched(tried: JudgedCandidate) -> tuple[str, ...]:
    return (str(tried.candidate), str(tried.num_requests), *_figures(tried.outcome))


def _lived(live: LiveRuns) -> Iterator[tuple[str, ...]]:
    for candidate, outcome in live.measured.items():
        yield (str(candidate), "measured", *_figures(outcome))
        yield ("", "simulated", *_figures(live.predicted[candidate]))


def _figures(outcome: LoadOutcome) -> tuple[str, ...]:
    return (
        f"{outcome.goodput:.2f}",
        f"{outcome.attainment:.0%}",
        f"{outcome.strain:.0%}",
        outcome.binding,
        f"{outcome.output_throughput:.0f}",
    )


def _figure(model: str, result: Result) -> Figure:
    from octavo.plots.tuning import TunedPoint, tuning_pareto
    from octavo.tuning.space import DEFAULTS

    front = {each.candidate for each in result.found.pareto}
    names = {result.decision.simulated: "chosen"}
    names[DEFAULTS] = "the defaults, chosen" if DEFAULTS in names else "the defaults"
    points = [
        TunedPoint(
            each.outcome.goodput,
            each.outcome.strain,
            each.candidate in front,
            names.get(each.candidate, ""),
        )
        for each in result.found.tried
    ]
    return tuning_pareto(points, title=f"{model}: settings that were tried, simulated")
