"""``octavo trace``: request traces of other people's formats, converted and described."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli import Command, UsageError, terminal
from octavo.cli.flags import add_json_flag, add_switch, add_value

if TYPE_CHECKING:
    from octavo.workload.traces import TraceEntry, TraceStatistics

# As in octavo.workload.trace_formats, which a test checks; --help need not import it.
KINDS = ("octavo", "mooncake", "bailian", "azure", "burstgpt", "vidur", "splitwise")

COMMANDS = {
    "convert": Command("trace", "configure_convert", "read a trace and write it in another format"),
    "stats": Command("trace", "configure_stats", "rate, lengths and shared prefixes of a trace"),
}

EXAMPLES = """\
examples:
  octavo trace stats conversation_trace.jsonl
  octavo trace convert BurstGPT_1.csv burst.jsonl
"""

CONVERT_EXAMPLES = """\
A trace without --to is written as octavo's own JSON lines, which hold all that any format has.

examples:
  octavo trace convert AzureLLMInferenceTrace_conv.csv azure.jsonl
  octavo trace convert qwen_trace.jsonl blocks512.jsonl --from bailian --to mooncake
  octavo trace convert BurstGPT_1.csv burst.jsonl --keep-failures
"""

STATS_EXAMPLES = """\
examples:
  octavo trace stats conversation_trace.jsonl
  octavo trace stats BurstGPT_1.csv --limit 10000 --json
"""


def configure_convert(parser: argparse.ArgumentParser) -> None:
    parser.epilog = CONVERT_EXAMPLES
    parser.add_argument("input", metavar="IN", help="the trace to read")
    parser.add_argument("output", metavar="OUT", help="the file to write or replace")
    _add_reading(parser)
    parser.add_argument("--to", metavar="KIND", choices=KINDS, help="format of OUT")
    parser.set_defaults(run=convert)


def configure_stats(parser: argparse.ArgumentParser) -> None:
    parser.epilog = STATS_EXAMPLES
    parser.add_argument("input", metavar="IN", help="the trace to read")
    _add_reading(parser)
    parser.set_defaults(run=stats)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="kind",
        metavar="KIND",
        choices=("auto", *KINDS),
        default="auto",
        help=f"format of IN: {', '.join(KINDS)}; default: recognised by its first line",
    )
    add_value(parser, "--limit N", "read the first N requests", int)
    add_switch(parser, "--keep-failures", "keep requests of BurstGPT that got no answer")
    add_json_flag(parser)


def convert(args: argparse.Namespace) -> int:
    from octavo.workload.traces import lost_fields, write_trace

    if args.to is None and Path(args.output).suffix == ".csv":
        raise UsageError("say which kind of CSV with --to azure, burstgpt, vidur or splitwise")
    kind = args.to or "octavo"
    entries = _read(args)
    write_trace(args.output, kind, entries)
    lost = lost_fields(entries, kind)
    if args.json:
        document = {"output": args.output, "kind": kind, "count": len(entries), "lost": lost}
        terminal.print_json(document)
        return 0
    print(f"{args.output}: {len(entries)} requests as {kind}")
    if lost:
        terminal.say(f"left out, {kind} has no place for it: {', '.join(lost)}")
    return 0


def stats(args: argparse.Namespace) -> int:
    from octavo.workload.traces import statistics

    entries = _read(args)
    found = statistics(entries)
    if args.json:
        terminal.print_json(found.as_json())
    else:
        _print(found)
    return 0


def _read(args: argparse.Namespace) -> list[TraceEntry]:
    from octavo.workload.traces import read_trace

    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit is {args.limit}, and must be 1 or more")
    return read_trace(args.input, args.kind, limit=args.limit, keep_failures=args.keep_failures)


def _print(found: TraceStatistics) -> None:
    from rich.table import Table

    console = terminal.console()
    rate, variation = found.requests_per_s, found.gap_cv
    rows = [
        ("requests", f"{found.count}"),
        ("span", f"{found.span_s:.1f} s"),
        ("rate", "all at once" if rate is None else f"{rate:.3g} requests/s"),
        ("variation of gaps", "-" if variation is None else f"{variation:.2f} (Poisson: 1)"),
        ("sessions", f"{found.num_sessions}" if found.num_sessions else "-"),
    ]
    share = found.shared_prefix_share
    rows.append(("shared prefixes", "-" if share is None else f"{share:.1%} of the prompt tokens"))
    for name, value in rows:
        console.print(f"{name:<18} {value}", markup=False)
    table = Table("tokens", *(name for name in ("mean", "min", "P50", "P90", "P99", "max")))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, of in (("prompt", found.input_len), ("answer", found.output_len)):
        values = (of.mean, of.min, of.p50, of.p90, of.p99, of.max)
        table.add_row(name, *(f"{value:.0f}" for value in values))
    console.print(table)
