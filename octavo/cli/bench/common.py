"""Flags, progress and reports of the benchmarks that load an engine in this process.

configure:  add_benchmark_arguments(parser)
run:        with open_session(engine_args(args)) as session, ... as recorder: ...
            report(args, document, lambda console: ...)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.cli import terminal
from octavo.cli.engine_flags import (
    LORA_SETTINGS,
    add_engine_flags,
    add_model_argument,
    engine_kwargs,
)
from octavo.cli.flags import add_json_flag, add_number, add_value
from octavo.settings.engine import EngineArgs

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from octavo.bench.offline.roofline import Roofline
    from octavo.bench.offline.session import OfflineSession

# Settings of an engine that are in the short help of benchmarks.
OFTEN = ("device", "kv_cache_dtype", "max_num_seqs", "threads")
# What argparse or the command line itself put into the arguments, and where results go.
_NO_SETTINGS = {"run", "prog", "version", "command", "subcommand", "json", "output"}


def add_benchmark_arguments(
    parser: argparse.ArgumentParser, *, skip: Collection[str] = (), plot: bool = True
) -> None:
    """MODEL, ``--name`` for every field of EngineArgs but those of ``skip``, and where the result
    goes: ``--json``, ``--output`` and ``--plot``."""
    add_model_argument(parser)
    add_output_flags(parser)
    if plot:
        add_plot_flag(parser)
    add_engine_flags(parser, skip={*skip, *LORA_SETTINGS}, often=OFTEN)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    add_json_flag(parser)
    add_value(parser, "--output FILE", "write the JSON object to a file, too")


def add_repeat_flag(parser: argparse.ArgumentParser, *, repeat: int) -> None:
    add_number(parser, "--repeat", "times to measure; medians are reported", repeat)


def add_repeat_flags(parser: argparse.ArgumentParser, *, repeat: int, warmup: int) -> None:
    add_repeat_flag(parser, repeat=repeat)
    add_number(parser, "--warmup", "runs before them that do not count", warmup, least=0)


def add_seed_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--seed`` of the requests; the engine's own matters to sampling only."""
    add_number(parser, "--seed", "of what is asked: the same seed, the same requests", 0, least=0)


def add_plot_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--plot FILE``, which may come several times: ``args.plot``, None without."""
    parser.add_argument(
        "--plot",
        action="append",
        type=_plot_path,
        metavar="FILE",
        help="draw a picture, as .png or .svg; may be given several times; needs matplotlib",
    )


def _plot_path(text: str) -> str:
    from octavo.plots.style import plot_format

    try:
        plot_format(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def save_plots(args: argparse.Namespace, draw: Callable[[], Figure]) -> None:
    for path in args.plot or ():
        from octavo.plots.style import save

        save(draw(), path)


def engine_args(args: argparse.Namespace, **defaults: Any) -> EngineArgs:
    """Settings of the engine: what the user gave, else ``defaults``, else EngineArgs' own.

    Raises:
        UsageError: a bad value.
    """
    return EngineArgs.from_kwargs(args.model, **{**defaults, **engine_kwargs(args)})


def asked_for(args: argparse.Namespace) -> dict[str, Any]:
    """The command line as JSON, for `octavo.bench.record.Recorder`."""
    prefix = f"{EngineArgs.__name__}_"
    settings = {
        name: str(value) if isinstance(value, PurePath) else value
        for name, value in vars(args).items()
        if name not in _NO_SETTINGS and not name.startswith(prefix)
    }
    command = getattr(args, "subcommand", args.command)
    return {"benchmark": command, **settings, "engine": engine_kwargs(args)}


def open_session(settings: EngineArgs) -> OfflineSession:
    """Fetch the model if need be, and load it; with progress on a terminal."""
    terminal.resolve(settings.model)
    with terminal.spinner("starting"):
        from octavo.bench.offline.session import OfflineSession
    if not terminal.can_animate():
        return OfflineSession(settings)
    with terminal.progress_bar("loading", settings.model) as progress:
        return OfflineSession(settings, progress)


def report(
    args: argparse.Namespace,
    document: Mapping[str, Any],
    print_tables: Callable[[Console], None],
    draw: Callable[[], Figure] | None = None,
) -> None:
    """The end of every benchmark: the result to stdout, ``--output`` and ``--plot``, doubts to
    stderr.

    ``document["run"]`` is the Recorder's object; its warnings are said, and the table ends with a
    line of what was measured where. There is none where nothing was measured.
    """
    run = document.get("run")
    if args.json:
        terminal.print_json(document)
    else:
        # Without a terminal there is no width to keep to, and a file is no place for wrapped lines.
        width = None if sys.stdout.isatty() else 120
        console = terminal.console(width=width, wraps=True)
        print_tables(console)
        if run is not None:
            console.print(footer(run), style="dim", markup=False)
    for warning in run["warnings"] if run is not None else ():
        terminal.say(f"warning: {warning}")
    if args.output:  # last, so that a file that cannot be written costs no measurement
        from octavo.measure.results import write_json

        write_json(args.output, document)
    if draw is not None:
        save_plots(args, draw)


def footer(run: Mapping[str, Any]) -> str:
    """One line: ``octavo 0.1.0, AMD EPYC, native kernels (avx512bf16), 2 threads, …``."""
    engine = run["engine"] or {}
    gpus = [gpu["name"] for gpu in run["machine"]["gpus"]]
    on_gpu = str(engine.get("device", "")).startswith("cuda")
    parts = [
        f"octavo {run['versions']['octavo']}",
        gpus[0] if on_gpu and gpus else run["machine"]["cpu"]["model"],
    ]
    if engine.get("kernels"):
        level = f" ({engine['isa']})" if engine.get("isa") else ""
        parts.append(f"{engine['kernels']} kernels{level}")
    parts.append(f"{run['threads']} threads" if run["threads"] != 1 else "1 thread")
    before = run["noise"]["before"]
    if before:
        parts.append(f"{before['read_gbytes_per_s']:.0f} GB/s read")
    return ", ".join([*parts, run["date"]])


def print_figures(
    console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """A table whose first column is words and whose others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console.print(title, style="bold", markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_roofline(console: Console, roofline: Roofline) -> None:
    """Print the bound of prefill and of decode, and how close each came to it."""
    rows = []
    for name, part in (("prefill", roofline.prefill), ("decode", roofline.decode)):
        if part is None:
            continue
        total = part.work.total
        rows.append(
            (
                name,
                part.bound,
                f"{part.floor_s / part.wall_s:.0%}",
                f"{part.wall_s / part.num_steps * 1e3:,.2f}",
                f"{part.floor_s / part.num_steps * 1e3:,.2f}",
                f"{total.bytes / part.wall_s / 1e9:,.1f}",
                f"{part.mbu:.0%}",
                f"{total.flops / part.wall_s / 1e9:,.0f}",
                f"{part.mfu:.0%}",
            )
        )
    head = ("", "bound by", "reached", "ms/step", "least ms", "GB/s", "MBU", "Gop/s", "MFU")
    title = (
        f"Roofline: {roofline.ceilings.bytes_per_s / 1e9:.0f} GB/s, "
        f"{roofline.ceilings.linear / 1e9:,.0f} Gop/s ({roofline.ceilings.arithmetic[0]})"
    )
    print_figures(console, title, head, rows)
    print_figures(
        console,
        "Weights",
        ("computed in", "MB", "bits", "least ms", "Gop/s at most"),
        [
            (
                kind.arithmetic,
                f"{kind.num_bytes / 1e6:,.1f}",
                f"{kind.bits:.2f}",
                f"{kind.num_bytes / roofline.ceilings.bytes_per_s * 1e3:,.2f}",
                f"{kind.ops_per_s / 1e9:,.0f}",
            )
            for kind in roofline.ceilings.weights
        ],
    )
