"""``octavo bench latency``: one batch, over and over."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.engine_flags import engine_kwargs
from octavo.cli.flags import add_number, from_flags
from octavo.settings.engine import CPU_MAX_NUM_SEQS

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from octavo.bench.offline.latency import LatencyResult

EXAMPLES = """\
Medians, and the range over the repetitions. docs/metrics.md says what each figure is.

examples:
  octavo bench latency
  octavo bench latency smollm2-135m --input-len 1024 --output-len 256
  octavo bench latency --batch-size 8 --threads 4 --kv-cache-dtype int8
  octavo bench latency --json | jq .decode_tps.median
  octavo bench latency --output results/latency.json
"""


_ROWS = (
    ("time to first token (TTFT)", "ms", "ttft_ms"),
    ("time per output token (TPOT)", "ms", "tpot_ms"),
    ("end to end", "ms", "e2e_ms"),
    ("prefill", "tokens/s", "prefill_tps"),
    ("decode", "tokens/s", "decode_tps"),
    ("step overhead", "µs", "step_overhead_us"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_benchmark_arguments(parser, skip={"seed"})
    add_number(parser, "--input-len", "tokens of each prompt", 512)
    add_number(parser, "--output-len", "tokens to generate for each", 128)
    add_number(parser, "--batch-size", "requests that are given at once", 1)
    common.add_repeat_flags(parser, repeat=5, warmup=1)
    common.add_seed_flag(parser)


def run(args: argparse.Namespace) -> int:
    given = engine_kwargs(args).get("max_num_seqs")
    if given is not None and given < args.batch_size:
        raise UsageError(f"--batch-size {args.batch_size} is more than --max-num-seqs {given}")
    roomier = {"max_num_seqs": args.batch_size} if args.batch_size > CPU_MAX_NUM_SEQS else {}
    settings = common.engine_args(args, seed=args.seed, **roomier)
    with common.open_session(settings) as session:
        from octavo.bench.offline.latency import LatencyPlan, measure_latency

        plan = from_flags(LatencyPlan, args)
        with terminal.progress_over("measuring", args.warmup + args.repeat) as advance:
            result = measure_latency(session, plan, common.asked_for(args), advance)
    common.report(args, result.as_json(), partial(print_result, result), partial(_figure, result))
    return 0


def _figure(result: LatencyResult) -> Figure:
    from octavo.plots.distributions import latency_distributions

    samples = {
        label: [value for each in result.samples if (value := getattr(each, name)) is not None]
        for label, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms"))
    }
    return latency_distributions(samples, title=f"{result.model}, batch {result.plan.batch_size}")


def print_result(result: LatencyResult, console: Console) -> None:
    plan = result.plan
    rows = []
    for label, unit, name in _ROWS:
        spread = result.spread(name)
        if spread is not None:
            values = (f"{value:,.1f}" for value in (spread.median, spread.min, spread.max))
            rows.append((label, unit, *values))
    rows.append(("peak memory", "", terminal.format_bytes(result.peak_rss_bytes), "", ""))
    common.print_figures(
        console,
        f"{result.model}: batch {plan.batch_size}, {plan.input_len} prompt and {plan.output_len} "
        f"output tokens, {plan.repeat} times",
        ("", "", "median", "min", "max"),
        rows,
    )
    common.print_roofline(console, result.roofline)
