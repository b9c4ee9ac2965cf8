"""``octavo bench spec``: measures each method of speculative decoding beside plain decoding."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import BenchmarkError, ConfigError, ModelError
from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.flags import add_value, whole_number
from octavo.settings.engine import CPU_MAX_NUM_SEQS
from octavo.settings.speculation import METHODS

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.bench.offline.session import OfflineSession
    from octavo.bench.offline.spec import SpecPlan, SpecRow

EXAMPLES = """\
Each method has an engine of its own, which alternates with plain decoding of the same requests.
Speed-ups are medians over the turns, with the least and the greatest. Tokens are compared with
those of plain decoding.

Workloads: copy (texts repeated and summarized), edit (changes to code), rag (answers with quotes),
json (objects transformed), chat, random (tokens, answered at a temperature of 1), or a file with a
JSON object a line, with "prompt" or "messages".

examples:
  octavo bench spec
  octavo bench spec --methods ngram,suffix --workload copy,chat --batch-sizes 1,4
  octavo bench spec --methods draft_model=smollm2-135m --workload prompts.jsonl --json

docs/metrics.md says what each figure is.
"""

# The methods that need no model.
_DEFAULT_METHODS = ("auto", "ngram", "suffix")
_TAKES_MODEL = ("auto", "draft_model", "medusa", "eagle", "recurrent", "mtp")
_POSITIONS = 8  # shown in the table


class Method(NamedTuple):
    name: str
    model: str | None


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_benchmark_arguments(parser, skip={"seed", "spec_method", "spec_model"}, plot=False)
    add_value(
        parser,
        "--methods NAME[=MODEL],…",
        f"out of {', '.join(METHODS)} (default: {','.join(_DEFAULT_METHODS)})",
        _methods,
        default=[Method(name, None) for name in _DEFAULT_METHODS],
    )
    add_value(
        parser,
        "--spec-model MODEL",
        "a draft model, or a folder of trained heads, for methods that take one",
    )
    add_value(
        parser,
        "--workload NAME,…",
        "copy, summary, edit, rag, json, chat, random, or files (default: all but files)",
        lambda text: text.split(","),
    )
    add_value(
        parser,
        "--batch-sizes N,…",
        "requests that are decoded together (default: 1)",
        lambda text: [whole_number(part) for part in text.split(",")],
        default=[1],
    )
    add_value(
        parser,
        "--max-tokens N",
        "the most tokens of an answer (default: %(default)s)",
        whole_number,
        default=128,
    )
    add_value(
        parser,
        "--temperature T",
        "of all answers; 0 is greedy (default: 0, but 1 for random)",
        float,
    )
    common.add_repeat_flag(parser, repeat=3)
    common.add_seed_flag(parser)


def _methods(text: str) -> list[Method]:
    methods = []
    for part in text.split(","):
        name, _, model = part.strip().partition("=")
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METHODS)}")
        if model and name not in _TAKES_MODEL:
            raise argparse.ArgumentTypeError(f"{name} takes no model: {part.strip()!r}")
        methods.append(Method(name, model or None))
    return methods


def run(args: argparse.Namespace) -> int:
    from octavo.bench.record import Recorder

    plan = _plan(args)
    recorder = Recorder(common.asked_for(args), common.engine_args(args).threads)
    rows: list[SpecRow] = []
    skipped: dict[str, str] = {}
    total = len(args.methods) * plan.num_turns
    with recorder, terminal.progress_over("measuring", total) as advance:
        for method in args.methods:
            with _session(args, method, skipped) as session:
                if session is not None:
                    recorder.engine = session.info
                    rows += _measure(session, method.name, plan, advance)
    if not rows:
        raise BenchmarkError(f"nothing was measured: {'; '.join(skipped.values())}")
    recorder.warnings += [f"{name} was left out: {reason}" for name, reason in skipped.items()]
    recorder.warnings += _other_tokens(rows)
    recorder.samples = {"turns": [_turns(row) for row in rows]}
    document = {
        "model": args.model,
        "max_tokens": plan.max_tokens,
        "repeat": plan.repeat,
        "rows": [row.as_json() for row in rows],
        "step_ms": _step_ms(rows),
        "skipped": skipped,
        "run": recorder.as_json(),
    }
    common.report(args, document, lambda console: _print(console, args, rows))
    return 0


def _plan(args: argparse.Namespace) -> SpecPlan:
    with terminal.spinner("starting"):
        from octavo.bench.offline.spec import WORKLOADS, SpecPlan, check_workload
    temperature = args.temperature
    if temperature is not None and not 0 <= temperature <= 100:
        raise UsageError(f"--temperature must be from 0 to 100, not {temperature}")
    try:
        workloads = tuple(map(check_workload, args.workload or WORKLOADS))
    except ConfigError as error:
        raise UsageError(f"--workload: {error}") from error
    return SpecPlan(
        workloads, tuple(args.batch_sizes), args.max_tokens, args.repeat, temperature, args.seed
    )


@contextmanager
def _session(
    args: argparse.Namespace, method: Method, skipped: dict[str, str]
) -> Iterator[OfflineSession | None]:
    """Open an engine with a method; None if it cannot be used here, with the reason in
    ``skipped``."""
    most = max(args.batch_sizes)
    roomier = {"max_num_seqs": most} if most > CPU_MAX_NUM_SEQS else {}
    model = method.model or (args.spec_model if method.name in _TAKES_MODEL else None)
    try:
        settings = common.engine_args(
            args, seed=args.seed, spec_method=method.name, spec_model=model, **roomier
        )
        session = common.open_session(settings)
    except (ConfigError, ModelError) as error:
        skipped[method.name] = str(error)
        yield None
        return
    with session:
        yield session


def _measure(
    session: OfflineSession, method: str, plan: SpecPlan, advance: Any
) -> Iterator[SpecRow]:
    from octavo.bench.offline.spec import SpecStudy

    study = SpecStudy(session, method, plan)
    for workload in plan.workloads:
        for batch_size in plan.batch_sizes:
            yield study.measure(workload, batch_size, advance)


def _other_tokens(rows: list[SpecRow]) -> list[str]:
    return [
        f"{row.method} on {row.workload}: tokens differ from those of plain decoding"
        for row in rows
        if not row.same_tokens
    ]


def _turns(row: SpecRow) -> dict[str, Any]:
    return {
        "method": row.method,
        "workload": row.workload,
        "batch_size": row.batch_size,
        "base_decode_tps": [plain.tps for plain, _ in row.turns],
        "decode_tps": [drafted.tps for _, drafted in row.turns],
    }


def _step_ms(rows: list[SpecRow]) -> dict[str, dict[str, float]]:
    """Milliseconds of plain steps by their rows, for each method's engine."""
    return {
        row.method: {str(n): each * 1e3 for n, each in row.step_times.seconds_of.items()}
        for row in rows
    }


# -- for people -----------------------------------------------------------------------------------


def _print(console: Console, args: argparse.Namespace, rows: list[SpecRow]) -> None:
    from octavo.bench.offline.spec import MOST_BATCH

    head = (
        *("", "batch", "plain tok/s", "tok/s", "speed-up", "least–greatest"),
        *("tokens/draft", "accepted", "even at", "same"),
    )
    common.print_figures(
        console,
        f"{args.model}: speculative beside plain decoding",
        head,
        [_cells(row, MOST_BATCH) for row in rows],
    )
    drafting = [row for row in rows if row.drafts.num_drafts]
    if drafting:
        common.print_figures(
            console,
            "Drafts that were accepted up to each position",
            ("", "batch", *map(str, range(1, _POSITIONS + 1))),
            [(_name(row), str(row.batch_size), *_shares(row)) for row in drafting],
        )
    for method, times in _step_ms(rows).items():
        steps = ", ".join(f"{rows}: {each:.1f}" for rows, each in times.items())
        console.print(f"{method}: milliseconds of a plain step by rows: {steps}", markup=False)
    console.print(
        "tokens/draft: tokens of a step with a draft; even at: the batch at which such drafts do "
        "not pay any more",
        style="dim",
        markup=False,
    )


def _name(row: SpecRow) -> str:
    return f"{row.method}, {row.workload}"


def _cells(row: SpecRow, most_batch: int) -> tuple[str, ...]:
    length, rate = row.drafts.mean_accepted_length, row.drafts.acceptance_rate
    even = row.break_even_batch
    return (
        _name(row),
        str(row.batch_size),
        f"{row.base_decode_tps.median:,.1f}",
        f"{row.decode_tps.median:,.1f}",
        f"{row.speedup.median:.2f} ×",
        f"{row.speedup.min:.2f}–{row.speedup.max:.2f}",
        "none" if length is None else f"{length:.2f}",
        "" if rate is None else f"{rate:.0%}",
        "" if length is None else f"> {most_batch}" if even is None else str(even),
        "yes" if row.same_tokens else "no",
    )


def _shares(row: SpecRow) -> list[str]:
    shares = [f"{share:.0%}" for share in row.accepted_by_position[:_POSITIONS]]
    return [*shares, *[""] * (_POSITIONS - len(shares))]
