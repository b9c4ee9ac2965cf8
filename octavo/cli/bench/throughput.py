"""``octavo bench throughput``: many requests, given at once."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.flags import add_number, add_value, from_flags

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from octavo.bench.offline.throughput import ThroughputResult

EXAMPLES = """\
Without --dataset, prompts are random. A data set is a ShareGPT file, JSON lines with "prompt" or
"messages", or a trace; what it is, is seen from its beginning, or said with --dataset-name.
docs/metrics.md says what each figure is.

examples:
  octavo bench throughput
  octavo bench throughput --num-prompts 200 --input-len 512 --output-len 64 --max-num-seqs 32
  octavo bench throughput --dataset ShareGPT_V3_unfiltered_cleaned_split.json --num-prompts 100
  octavo bench throughput --dataset questions.jsonl --output-len 64
  octavo bench throughput --json | jq .output_tps
"""


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_benchmark_arguments(parser, skip={"seed"})
    add_number(
        *(parser, "--num-prompts"),
        "requests (default: 64 random ones, or all of a file; of ShareGPT at most 1000)",
    )
    add_number(parser, "--input-len", "tokens of each random prompt (default: 128)")
    add_number(
        *(parser, "--output-len"),
        "tokens to generate for each (default: 128 for random prompts, else as the file says)",
    )
    add_value(parser, "--dataset FILE", "prompts from a file", Path)
    add_value(
        parser,
        "--dataset-name NAME",
        "what the file is: sharegpt, jsonl, or a format of traces (default: looked at)",
    )
    common.add_repeat_flags(parser, repeat=3, warmup=1)
    common.add_seed_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.dataset is None and args.dataset_name not in (None, "random"):
        raise UsageError(f"--dataset-name {args.dataset_name} needs the file: --dataset FILE")
    if args.dataset is not None and args.input_len is not None:
        raise UsageError("--input-len is for random prompts; those of --dataset have their own")
    if args.dataset is not None and not args.dataset.is_file():
        raise UsageError(f"--dataset {args.dataset}: there is no such file")
    settings = common.engine_args(args, seed=args.seed)
    with common.open_session(settings) as session:
        from octavo.bench.offline.throughput import ThroughputPlan, measure_throughput

        name = args.dataset_name or ("random" if args.dataset is None else "auto")
        plan = from_flags(ThroughputPlan, args, dataset=name, path=args.dataset)
        with terminal.progress_over("measuring", args.warmup + args.repeat) as advance:
            result = measure_throughput(session, plan, common.asked_for(args), advance)
    common.report(args, result.as_json(), partial(print_result, result), partial(_figure, result))
    return 0


def _figure(result: ThroughputResult) -> Figure:
    from octavo.plots.distributions import latency_distributions

    samples = {
        label: [seconds * 1e3 for seconds in values]
        for label, values in (("TTFT", result.ttft_s), ("TPOT", result.tpot_s))
    }
    return latency_distributions(samples, title=f"{result.model}, {result.num_requests} requests")


def print_result(result: ThroughputResult, console: Console) -> None:
    rows = []
    for label, unit, name, digits in (
        ("elapsed time", "s", "elapsed_s", 2),
        ("requests", "1/s", "requests_per_s", 2),
        ("output", "tokens/s", "output_tps", 1),
        ("prompts and output", "tokens/s", "total_tps", 1),
        ("requests in a step", "", "mean_batch", 1),
        ("KV blocks in use, at most", "%", "kv_use", 1),
    ):
        spread = result.spread(name).scaled(100 if unit == "%" else 1)
        values = (f"{value:,.{digits}f}" for value in (spread.median, spread.min, spread.max))
        rows.append((label, unit, *values))
    common.print_figures(
        console,
        f"{result.model}: {result.num_requests} requests, {result.num_prompt_tokens} prompt and "
        f"{result.num_output_tokens} output tokens, {result.plan.repeat} times",
        ("", "", "median", "min", "max"),
        rows,
    )
    latencies = []
    document = result.as_json()
    for label, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        if document[name] is not None:
            values = (f"{document[name][p]:,.1f}" for p in ("p50", "p90", "p99"))
            latencies.append((label, "ms", *values))
    common.print_figures(console, "Of each request", ("", "", "P50", "P90", "P99"), latencies)
    common.print_roofline(console, result.roofline)
    preempted = document["num_preemptions"]
    console.print(
        f"{preempted} preemptions, peak memory {terminal.format_bytes(result.peak_rss_bytes)}",
        markup=False,
    )
    console.print(
        f"Throughput: {document['requests_per_s']:.2f} requests/s, "
        f"{document['total_tps']:.2f} total tokens/s, "
        f"{document['output_tps']:.2f} output tokens/s",
        markup=False,
    )
