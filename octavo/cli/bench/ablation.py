"""``octavo bench ablation``: the same work with each optimisation off in turn."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.flags import add_number, add_switch, add_value
from octavo.measure.statistics import MedianRange

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from octavo.bench.offline.ablation import AblationResult

EXAMPLES = """\
examples:
  octavo bench ablation
  octavo bench ablation --only kv-cache,prefix-cache
  octavo bench ablation gemma3-270m --quick --plot worth.svg

Each optimisation is judged by the work and the figure that it is for: a prefix cache by the time to
first token where prompts begin alike, chunked prefill by the gaps in others' answers. With and
without take turns.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_value(
        parser,
        "--only NAME,NAME,…",
        "measure these ablations (default: all that can be)",
        lambda text: [name.strip() for name in text.split(",")],
    )
    add_number(
        *(parser, "--repeat"),
        "turns of each; medians are reported (default: 3, with --quick 1)",
    )
    add_switch(parser, "--quick", "half the work, one turn")
    common.add_benchmark_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from octavo.bench.offline.ablation import choose_ablations
    from octavo.bench.offline.ablation_study import AblationStudy, ablation_settings
    from octavo.bench.record import Recorder

    try:
        chosen = choose_ablations(args.only)
    except ConfigError as error:
        raise UsageError(f"--only: {error}") from error
    settings = ablation_settings(common.engine_args(args))
    results, skipped = [], {}
    with common.open_session(settings) as session:
        repeat = args.repeat or (1 if args.quick else 3)
        study = AblationStudy(session, repeat=repeat, is_quick=args.quick)
        with (
            Recorder.of(session, common.asked_for(args)) as recorder,
            terminal.progress_over("measuring", len(chosen)) as advance,
        ):
            for ablation in chosen:
                reason = study.why_not(ablation)
                if reason is None:
                    results.append(study.measure(ablation))
                else:
                    skipped[ablation.name] = reason
                advance()
    recorder.warnings += [
        f"{result.ablation.name}: {result.num_answers - result.num_same_answers} of "
        f"{result.num_answers} answers differ, and none should"
        for result in results
        if result.same_answers == "no"
    ]
    recorder.samples = {result.ablation.name: _samples(result) for result in results}
    document = {
        "ablations": [result.as_json() for result in results],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
        "run": recorder.as_json(),
    }
    common.report(
        args,
        document,
        lambda console: _print(console, args, results, skipped),
        lambda: _figure(args, results),
    )
    return 0


def _figure(args: argparse.Namespace, results: list[AblationResult]) -> Figure:
    from octavo.plots.benchmarks import worth_bars

    worths = {f"{r.ablation.name}  ({r.ablation.figure.label})": r.worth for r in results}
    return worth_bars(worths, title=f"{args.model}: what each optimisation is worth")


def _samples(result: AblationResult) -> dict[str, Any]:
    """Figures of every turn."""
    from octavo.bench.offline.ablation import FIGURES

    return {
        side: [{figure.name: figure.of(work) for figure in FIGURES} for work in works]
        for side, works in (("on", result.on), ("off", result.off))
    }


def _print(
    console: Console,
    args: argparse.Namespace,
    results: list[AblationResult],
    skipped: dict[str, str],
) -> None:
    rows = []
    for result in results:
        spreads = result.spreads(result.ablation.figure)
        assert spreads is not None
        on, off, worth = spreads
        rows.append(
            [
                result.ablation.name,
                f"{worth.median:.2f}×",
                f"{worth.min:.2f}–{worth.max:.2f}",
                result.ablation.figure.label,
                _number(on),
                _number(off),
                result.workload,
                _answers(result),
            ]
        )
    head = ["", "worth", "min–max", "judged by", "with", "without", "work", "same answers"]
    title = f"{args.model}: with and without; work is requests × prompt + answer tokens"
    common.print_figures(console, title, head, rows)
    for result in results:
        console.print(f"{result.ablation.name}: {result.ablation.what}", markup=False, style="dim")
    if any(result.same_answers == "not promised" for result in results):
        console.print("same answers (n of m): that they are is not promised", style="dim")
    for name, reason in skipped.items():
        console.print(f"{name}: not measured: {reason}", markup=False)


def _number(spread: MedianRange) -> str:
    return f"{spread.median:.1f}" if spread.median < 1000 else f"{spread.median:.0f}"


def _answers(result: AblationResult) -> str:
    """Yes or no where it is promised; else how many, as it is not."""
    if result.same_answers != "not promised":
        return result.same_answers
    return f"({result.num_same_answers} of {result.num_answers})"
