"""``octavo bench structured``: answers under JSON schemas, whether they are valid, and what masks
cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.flags import add_number, add_value, from_flags
from octavo.settings.engine import CPU_MAX_NUM_SEQS

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.bench.offline.session import OfflineSession
    from octavo.bench.structured.llama_server import LlamaServer
    from octavo.bench.structured.study import StructuredRow
    from octavo.bench.structured.validity_study import ValidityRow

EXAMPLES = """\
Random schemas are answered with random logits and by the model, and checked by the package
jsonschema. Records, of which a third is fixed by their schema, are timed: one stream and several
beside plain decoding of as many tokens, and forced tokens as drafts beside none.

examples:
  octavo bench structured
  octavo bench structured qwen2.5-coder-0.5b --schemas 2000 --json
  octavo bench structured qwen2.5-coder-0.5b --valid 2000 --max-tokens 64
  octavo bench structured qwen2.5-coder-0.5b --llama-server ~/llama.cpp/build/bin/llama-server

docs/metrics.md says what each figure is.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_benchmark_arguments(parser, skip={"seed"}, plot=False)
    add_number(parser, "--schemas", "random schemas, answered with random logits", 200)
    add_number(
        parser,
        "--valid",
        "instead of all this: schemas of all keywords, answered with random logits and by the "
        "model; finished answers must be valid, and cut ones the beginning of something valid",
    )
    add_number(parser, "--streams", "of the row with several streams at once", 32)
    add_number(parser, "--max-tokens", "the most tokens of an answer", 256)
    add_value(
        parser,
        "--llama-server WHICH",
        "the program llama-server, to start with the same GGUF file, or the URL of one that runs "
        "with it: it answers the records too, and is timed beside",
    )
    common.add_repeat_flag(parser, repeat=3)
    common.add_seed_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.valid is None:
        return _measure(args)
    if args.llama_server is not None:
        raise UsageError("--llama-server is not for --valid, which checks the engine's own answers")
    return _check(args)


def _check(args: argparse.Namespace) -> int:
    from octavo.bench.record import Recorder
    from octavo.bench.structured.validity_study import ValidityStudy

    settings = common.engine_args(args, seed=args.seed, max_num_seqs=args.streams)
    recorder = Recorder(common.asked_for(args), settings.threads)
    numbers = range(args.seed, args.seed + args.valid)
    with (
        recorder,
        common.open_session(settings) as session,
        terminal.progress_over("checking", ValidityStudy.num_turns(args.valid)) as advance,
    ):
        recorder.engine = session.info
        rows = ValidityStudy(session, numbers, args.max_tokens, advance).measure()
    recorder.warnings += [
        f"{row.kind}: not all answers are valid" for row in rows if not row.is_sound
    ]
    document = {
        "model": args.model,
        "max_tokens": args.max_tokens,
        "rows": [row.as_json() for row in rows],
        "run": recorder.as_json(),
    }
    common.report(args, document, lambda console: _print_checks(console, args, rows))
    return 0 if all(row.is_sound for row in rows) else 1


def _measure(args: argparse.Namespace) -> int:
    from octavo.bench.record import Recorder
    from octavo.bench.structured.study import StructuredPlan, StructuredStudy

    plan = from_flags(StructuredPlan, args)
    roomier = {"max_num_seqs": args.streams} if args.streams > CPU_MAX_NUM_SEQS else {}
    settings = common.engine_args(args, seed=args.seed, **roomier)
    recorder = Recorder(common.asked_for(args), settings.threads)
    with (
        recorder,
        common.open_session(settings) as session,
        _peer(args, session) as peer,
        terminal.progress_over("measuring", StructuredStudy.num_turns(plan, peer)) as advance,
    ):
        recorder.engine = session.info
        rows = StructuredStudy(session, plan, advance, peer).measure()
    document = {
        "model": args.model,
        "max_tokens": plan.max_tokens,
        "repeat": plan.repeat,
        "rows": [row.as_json() for row in rows],
        "run": recorder.as_json(),
    }
    recorder.warnings += _invalid(rows)
    common.report(args, document, lambda console: _print(console, args, rows))
    return 0


@contextmanager
def _peer(args: argparse.Namespace, session: OfflineSession) -> Iterator[LlamaServer | None]:
    """Return the llama-server that is asked for, which may have to be started."""
    from octavo import hub
    from octavo.bench.structured.llama_server import LlamaServer, running_llama_server

    which: str | None = args.llama_server
    if which is None:
        yield None
    elif (program := Path(which).expanduser()).is_file():
        with running_llama_server(
            program,
            hub.resolve(args.model),
            streams=args.streams,
            threads=session.probe.num_threads,
            max_tokens=args.max_tokens,
        ) as server:
            yield server
    else:
        yield LlamaServer(which)


def _invalid(rows: list[StructuredRow]) -> list[str]:
    return [
        f"{row.kind}: {row.finished - row.valid} of {row.finished} finished answers are not valid"
        for row in rows
        if row.valid < row.finished
    ]


# -- for people -----------------------------------------------------------------------------------


def _print_checks(console: Console, args: argparse.Namespace, rows: list[ValidityRow]) -> None:
    head = ("", "schemas", "finished", "valid", "cut", "completed", "refused")
    figures = [
        (
            row.kind,
            *(str(n) for n in (row.schemas, row.finished, row.valid, row.cut, row.completed)),
            str(row.refused.total()),
        )
        for row in rows
    ]
    common.print_figures(console, f"{args.model}: answers under schemas", head, figures)
    for row in rows:
        for failure in row.failures[:3]:
            console.print(f"{row.kind}: {failure}", markup=False)
    refused = ", ".join(f"{name} {count}" for name, count in rows[0].refused.most_common())
    console.print(f"refused: {refused or 'none'}", style="dim", markup=False)


def _print(console: Console, args: argparse.Namespace, rows: list[StructuredRow]) -> None:
    head = (
        *("", "schemas", "refused", "finished", "valid"),
        *("mask µs", "compile ms", "tok/s", "plain", "ratio"),
    )
    title = f"{args.model}: answers under schemas"
    common.print_figures(console, title, head, [_cells(row.as_json()) for row in rows])
    console.print("masks: median, P99, P99.9; compiling: median, P99", style="dim", markup=False)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    mask, compiled = row["mask_us"] or {}, row["compile_ms"] or {}
    tps, plain, ratio = row["decode_tps"], row["plain_decode_tps"], row["ratio"]
    return (
        row["kind"],
        *(str(row[name]) for name in ("schemas", "refused", "finished", "valid")),
        " ".join(_number(each) for each in mask.values()),
        " ".join(_number(each, 2) for each in compiled.values()),
        _number(tps, 1),
        _number(plain, 1),
        f"{ratio['median']:.2f} ×" if ratio else "",
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
