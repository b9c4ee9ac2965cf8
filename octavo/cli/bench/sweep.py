"""``octavo bench sweep``: throughput and latencies against the number of requests in flight."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.flags import (
    above_zero,
    add_number,
    add_value,
    from_flags,
    real_number,
    whole_number,
)
from octavo.cli.parser import rarely

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.bench.offline.sweep import LoadSource, SweepPlan, SweepResult

EXAMPLES = """\
examples:
  octavo bench sweep
  octavo bench sweep --concurrency 1,4,16 --plot sweep.png
  octavo bench sweep gemma3-270m --max-tpot-ms 50 --max-ttft-ms 500
  octavo bench sweep --base-url http://127.0.0.1:8000 --csv sweep.csv

At each point so many requests are kept in flight: as one ends the next begins. Points take turns,
--repeat times, so that a machine that drifts does the same to all. The knee is where throughput
bends from rising to flat; with bounds on latencies, the best point within them is printed.
"""

MOST_IN_FLIGHT = 64

_percent = real_number("percentile: give 1 to 100", lambda value: 0 < value <= 100)


def configure(parser: argparse.ArgumentParser) -> None:
    add_value(
        parser,
        "--concurrency N,N,…",
        "requests in flight, point by point (default: powers of two up to max_num_seqs, and "
        f"at most {MOST_IN_FLIGHT})",
        _rising_numbers,
    )
    add_number(parser, "--input-len", "tokens of each prompt", 128)
    add_number(parser, "--output-len", "tokens of each answer", 128)
    add_number(parser, "--repeat", "times to measure each point; medians are reported", 3)
    add_number(
        *(parser, "--waves"),
        "requests measured each time, for each one in flight, after a wave that fills the engine",
        1,
    )
    _add_bounds(parser)
    _add_server(parser)
    add_value(parser, "--csv FILE", "write the points as a table")
    common.add_benchmark_arguments(parser)
    rarely(parser, "--waves", "--percentile", "--plot", "--output")


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bounds on latencies")
    for name, what in (("ttft", "time to first token"), ("tpot", "time per output token")):
        group.add_argument(f"--max-{name}-ms", type=above_zero, metavar="MS", help=what)
    add_value(group, "--max-e2e-ms MS", "whole request", above_zero)
    add_value(
        group,
        "--percentile P",
        "of the latencies that must be within the bounds (default: %(default)g)",
        _percent,
        default=99.0,
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a running server, in place of an engine in this process")
    add_value(
        group,
        "--base-url URL",
        "of a server with OpenAI's completions; MODEL is then the one whose tokens prompts "
        "are made of",
    )
    add_value(group, "--model-name NAME", "as the server calls it (default: ask the server)")


def run(args: argparse.Namespace) -> int:
    return _sweep_server(args) if args.base_url else _sweep_engine(args)


def _sweep_engine(args: argparse.Namespace) -> int:
    if args.model_name:
        raise UsageError("--model-name goes with --base-url")
    with common.open_session(common.engine_args(args)) as session:
        from octavo.bench.offline.load_sources import EngineUnderLoad
        from octavo.bench.record import Recorder
        from octavo.measure.concurrency import powers_of_two

        limit = min(session.loaded.config.scheduler.max_num_seqs, MOST_IN_FLIGHT)
        plan = _plan(args, args.concurrency or powers_of_two(limit), session.loaded.config.seed)
        source = EngineUnderLoad(session)
        source.warm_up(plan)
        with Recorder.of(session, common.asked_for(args)) as recorder:
            result = _measure(args, source, plan)
    return _tell(args, result, recorder)


def _sweep_server(args: argparse.Namespace) -> int:
    if given := common.asked_for(args)["engine"]:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise UsageError(f"{flag} is for an engine in this process: it goes not with --base-url")
    import os
    from functools import partial

    from octavo.bench.offline.load_sources import ServerUnderLoad
    from octavo.bench.record import Recorder
    from octavo.bench.serving.endpoint import server_url
    from octavo.bench.serving.http_client import HttpClient
    from octavo.measure.concurrency import powers_of_two
    from octavo.sources.open import load_tokenizer

    vocab_size = load_tokenizer(terminal.resolve(args.model)).vocab_size
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    create_client = partial(HttpClient, server_url(args.base_url), headers=headers)
    try:
        source = ServerUnderLoad(create_client, args.model_name, vocab_size)
        plan = _plan(args, args.concurrency or powers_of_two(MOST_IN_FLIGHT), 0)
        source.warm_up(plan)
    except ValueError as error:
        raise UsageError(f"--base-url: {error}") from error
    with Recorder(common.asked_for(args), owns_work=False) as recorder:
        result = _measure(args, source, plan)
    return _tell(args, result, recorder)


def _plan(args: argparse.Namespace, concurrencies: tuple[int, ...], seed: int) -> SweepPlan:
    from octavo.bench.offline.sweep import SweepPlan

    return from_flags(SweepPlan, args, concurrencies=concurrencies, seed=seed)


def _measure(args: argparse.Namespace, source: LoadSource, plan: SweepPlan) -> SweepResult:
    from octavo.bench.offline.sweep import LatencyBounds, sweep

    bounds = LatencyBounds(args.max_ttft_ms, args.max_tpot_ms, args.max_e2e_ms, args.percentile)
    total = len(set(plan.concurrencies)) * plan.repeat
    with terminal.progress_over("sweeping", total) as advance:
        return sweep(source, plan, bounds, advance)


def _tell(args: argparse.Namespace, result: SweepResult, recorder: Any) -> int:
    recorder.samples = {
        "points": [[each.as_json() for each in point.samples] for point in result.points]
    }
    document = {**result.as_json(), "run": recorder.as_json()}
    if args.csv:
        from octavo.bench.offline.sweep import to_csv
        from octavo.measure.results import write_text

        write_text(args.csv, to_csv(result.points))
    common.report(
        args,
        document,
        lambda console: _print(console, args, result),
        lambda: _figure(args, result),
    )
    return 0


def _print(console: Console, args: argparse.Namespace, result: SweepResult) -> None:
    head = ("in flight", "output tok/s", "min–max", "total tok/s", "TTFT ms", "TPOT ms", "ITL ms")
    rows = []
    for point in result.points:
        output = point.output_tps
        rows.append(
            [
                str(point.concurrency),
                f"{output.median:.1f}",
                f"{output.min:.1f}–{output.max:.1f}",
                f"{point.total_tps.median:.1f}",
                *(_pair(point.latency_ms(name, 50), point.latency_ms(name, 99)) for name in _SHOWN),
                "–" if point.mean_batch is None else f"{point.mean_batch:.1f}",
            ]
        )
    title = f"{args.model}: {args.input_len} + {args.output_len} tokens, latencies p50 / p99"
    common.print_figures(console, title, [*head, "E2E ms", "batch"], rows)
    console.print(str(result.knee), markup=False)
    if (sentence := best_sentence(result)) is not None:
        console.print(sentence, markup=False)
    preemptions = sum(point.num_preemptions or 0 for point in result.points)
    if preemptions:
        console.print(f"{preemptions} preemptions: the KV pool is small for this much load")


_SHOWN = ("ttft", "tpot", "itl", "e2e")


def best_sentence(result: SweepResult) -> str | None:
    """Say which number of requests in flight is best within the bounds; None without bounds."""
    best = result.best
    if best is None:
        return None
    bounds = result.bounds
    given = bounds.given()
    asked = ", ".join(f"{name.upper()} ≤ {bound:g} ms" for name, bound in given.items())
    has = ", ".join(
        f"{name.upper()} {excess * given[name]:.1f} ms" for name, excess in best.excesses.items()
    )
    what = f"{best.point.concurrency} in flight: {best.point.output_tps.median:.1f} output tok/s"
    asked = f"p{bounds.percent:g} {asked}"
    if best.is_met:
        return f"best with {asked}: {what}, {has}"
    return f"none meets {asked}; nearest is {what}, {has}"


def _pair(median: float | None, tail: float | None) -> str:
    if median is None or tail is None:
        return "–"
    return f"{median:.1f} / {tail:.1f}" if tail < 1000 else f"{median:.0f} / {tail:.0f}"


def _figure(args: argparse.Namespace, result: SweepResult) -> Any:
    from octavo.plots.benchmarks import throughput_curve

    best = result.best
    return throughput_curve(
        result.points,
        title=f"{args.model}: {args.input_len} + {args.output_len} tokens",
        knee=result.knee.concurrency,
        chosen=best.point.concurrency if best and best.is_met else None,
        tpot_bound_ms=args.max_tpot_ms,
    )


def _rising_numbers(text: str) -> tuple[int, ...]:
    numbers = sorted({whole_number(part.strip()) for part in text.split(",")})
    return tuple(numbers)
