"""``octavo bench compare``: octavo beside other engines on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli import UsageError, terminal
from octavo.cli.bench.common import add_output_flags, report
from octavo.cli.engine_flags import (
    LORA_SETTINGS,
    add_engine_flags,
    add_model_argument,
    engine_kwargs,
)
from octavo.cli.flags import add_number, add_value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from octavo.bench.peers.compare import ComparisonPlan, ComparisonResult

EXAMPLES = """\
Peers are set up by benchmarks/peers/setup_llama_cpp and setup_vllm of octavo's source tree. One
that is not there is left out, with a line that says how to get it. "llama.cpp" means the weights
that it is compared with by default, "llama.cpp:q4_0" those alone. Engine flags are octavo's, but
--threads is for all engines.

examples:
  octavo bench compare
  octavo bench compare --peers llama.cpp,vllm,transformers --rounds 3
  octavo bench compare --peers llama.cpp:q4_0 --octavo-weights file --workloads decode,prefill
  octavo bench compare --rounds 3 --json --output peers.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_value(
        parser,
        "--peers NAMES",
        "llama.cpp, vllm, transformers, or engine:weights (default: llama.cpp,vllm)",
        _words,
        default=["llama.cpp", "vllm"],
    )
    add_value(
        parser,
        "--octavo-weights NAMES",
        "what octavo runs: file (as it is), bf16 (what peers run) (default: file,bf16)",
        _words,
        default=["file", "bf16"],
    )
    add_number(parser, "--rounds", "turns of all engines", 3)
    add_value(
        parser,
        "--workloads NAMES",
        "decode, decode-1k, prefill, batch-32, batch-64, start (default: all)",
        _words,
    )
    parser.add_argument(
        "--dir", type=Path, help="where the peers are set up (default: ~/.cache/octavo-peers)"
    )
    add_output_flags(parser)
    add_engine_flags(parser, skip=LORA_SETTINGS)


def run(args: argparse.Namespace) -> int:
    engine = engine_kwargs(args)
    plan = _plan(args)  # before anything is fetched
    from octavo.base.errors import ConfigError
    from octavo.bench.peers.compare import compare
    from octavo.bench.peers.contenders import (
        PeerSettings,
        default_folder,
        how_to_install,
        missing_engines,
    )
    from octavo.system import machine

    folder = (args.dir or default_folder()).expanduser().resolve()
    # Said before a model is fetched, where no other engine is here.
    missing_engines(plan.names, lambda name: how_to_install(name.partition(":")[0], folder))
    gguf = terminal.resolve(args.model)
    if gguf.suffix != ".gguf":
        raise ConfigError(f"{args.model}: the comparison starts from a .gguf file")
    threads = engine.pop("threads", None) or machine.cpu().usable_cores
    result = compare(plan, PeerSettings(folder, gguf.resolve(), threads, engine), terminal.say)
    report(args, result.as_json(), lambda console: print_result(console, result))
    return 0


def _words(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word]


def _plan(args: argparse.Namespace) -> ComparisonPlan:
    from octavo.bench.peers.compare import ComparisonPlan
    from octavo.bench.peers.contenders import choose
    from octavo.bench.peers.workers.workloads import WORKLOADS

    chosen = list(WORKLOADS) if args.workloads is None else args.workloads
    unknown = [name for name in chosen if name not in WORKLOADS]
    if unknown:
        raise UsageError(f"unknown workload {unknown[0]!r}: there are {', '.join(WORKLOADS)}")
    if not chosen:
        raise UsageError("--workloads needs at least one")
    try:
        names = choose([*(f"octavo:{weights}" for weights in args.octavo_weights), *args.peers])
    except ValueError as error:
        raise UsageError(str(error)) from error
    return ComparisonPlan(names, [WORKLOADS[name] for name in dict.fromkeys(chosen)], args.rounds)


def print_result(console: Console, result: ComparisonResult) -> None:
    if not console.is_terminal:
        console.width = max(console.width, 160)  # one line for each row
    console.print(create_table(result))


def create_table(result: ComparisonResult) -> Table:
    """A section for each figure, with a column for the lead of each of octavo's own weights."""
    from rich.table import Table

    from octavo.bench.peers.workers.workloads import FIGURES, WORKLOADS

    ours = [our for our in result.ours if any(row.contender == our for row in result.rows)]
    table = Table(title="medians over the rounds (minimum – maximum)", title_justify="left")
    for heading in ("workload", "figure", "engine", "weights"):
        table.add_column(heading, no_wrap=heading != "workload")
    for heading in ("median", "range"):
        table.add_column(heading, justify="right", no_wrap=True)
    for our in ours:
        table.add_column(f"octavo {result.weights[our]} is faster by", justify="right")
    previous = ("", "")
    for row in result.rows:
        place = (row.workload, row.figure)
        if previous != ("", "") and place != previous:
            table.add_section()
        workload = WORKLOADS[row.workload]
        figure = next(f for f in FIGURES[workload.kind] if f.name == row.figure)
        is_new = place != previous
        table.add_row(
            workload.title if is_new and row.workload != previous[0] else "",
            figure.title if is_new else "",
            row.contender.partition(":")[0],
            result.weights[row.contender],
            _number(row.median),
            f"{_number(row.min)} – {_number(row.max)}" if row.num_samples > 1 else "",
            *(str(row.ratios[our]) if our in row.ratios else "" for our in ours),
        )
        previous = place
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
