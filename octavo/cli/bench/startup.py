"""``octavo bench startup``: from the start of a process to its first token."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from octavo.cli import terminal
from octavo.cli.bench import common
from octavo.cli.engine_flags import engine_kwargs
from octavo.cli.flags import add_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from octavo.bench.offline.startup import StartupResult

EXAMPLES = """\
Each start is a process of its own. What is warm, and what is cold, is said below the table.

examples:
  octavo bench startup
  octavo bench startup ./model.gguf --num-iters-cold 1 --num-iters-warm 5
  octavo bench startup --kernels reference --json | jq .warm_s
"""

_ROWS = (
    ("interpreter and imports", "import_s"),
    ("header", "header_s"),
    ("tokenizer", "tokenizer_s"),
    ("weights", "weights_s"),
    ("program", "program_s"),
    ("first token", "answer_s"),
    ("process start to ready", "ready_s"),
    ("process start to first token", "first_token_s"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_benchmark_arguments(parser)
    add_number(parser, "--num-iters-cold", "cold starts; medians are reported", 2)
    add_number(parser, "--num-iters-warm", "warm starts; medians are reported", 3)


def run(args: argparse.Namespace) -> int:
    given = engine_kwargs(args)
    terminal.resolve(args.model)
    from octavo.bench.offline.startup import StartupPlan, measure_startup

    plan = StartupPlan(args.num_iters_cold, args.num_iters_warm)
    with terminal.progress_over("starting", 1 + plan.num_cold + plan.num_warm) as advance:
        result = measure_startup(args.model, given, plan, common.asked_for(args), advance)
    common.report(args, result.as_json(), partial(print_result, result), partial(_figure, result))
    return 0


def _figure(result: StartupResult) -> Figure:
    from octavo.bench.offline.startup import spread
    from octavo.plots.benchmarks import time_bars

    times = {
        f"{kind}, {until}": spread(starts, name)
        for kind, starts in (("cold", result.cold), ("warm", result.warm))
        for until, name in (("ready", "ready_s"), ("first token", "first_token_s"))
    }
    return time_bars(times, title=f"{result.model}: from the start of the process", unit="s")


def print_result(result: StartupResult, console: Console) -> None:
    from octavo.bench.offline.startup import WARM, spread

    rows = []
    for label, name in _ROWS:
        cold, warm = spread(result.cold, name), spread(result.warm, name)
        values = (cold.median, cold.min, cold.max, warm.median, warm.min, warm.max)
        rows.append((label, *(f"{value:.3f}" for value in values)))
    common.print_figures(
        console,
        f"{result.model}: seconds of {len(result.cold)} cold and {len(result.warm)} warm starts",
        ("", "cold", "min", "max", "warm", "min", "max"),
        rows,
    )
    peak = max(start.peak_rss_bytes for start in result.warm)
    console.print(f"peak memory {terminal.format_bytes(peak)}", markup=False)
    console.print(f"warm: {WARM}", markup=False)
    console.print(f"cold: {result.cold_means}", markup=False)
