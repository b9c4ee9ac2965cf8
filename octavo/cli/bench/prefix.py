"""``octavo bench prefix``: time to first token where prompts begin alike."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.cli import UsageError
from octavo.cli.bench import common
from octavo.cli.text_file import read_text
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from octavo.bench.offline.prefix import PrefixPlan, PrefixResult
    from octavo.bench.offline.session import OfflineSession

EXAMPLES = """\
examples:
  octavo bench prefix
  octavo bench prefix --prefix-len 2048 --questions 16
  octavo bench prefix --text README.md --prefix-len 512 --json

Many questions about one document, one after the other: the first finds nothing in the prefix cache
(cold), the others find the document (warm). An engine without the cache answers the same, turn by
turn.
"""

_LENGTHS = {
    "prefix-len": (1024, "tokens of the document"),
    "question-len": (32, "tokens of each question, which follows the document"),
    "questions": (8, "about each document"),
    "output-len": (16, "tokens of each answer"),
    "repeat": (3, "documents, each with questions of its own"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    for name, (default, what) in _LENGTHS.items():
        parser.add_argument(
            f"--{name}",
            type=common.positive,
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument("--text", metavar="FILE", help="the document (default: random tokens)")
    common.add_plot_flag(parser)
    common.add_output_flags(parser)
    common.add_engine_arguments(parser, skip={"enable_prefix_caching"})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    common.check_plots(args)
    settings = common.engine_args(args)
    text = read_text(args.text, "--text") if args.text else None
    with (
        common.open_session(settings) as with_cache,
        common.open_session(replace(settings, enable_prefix_caching=False)) as without_cache,
    ):
        from octavo.bench.offline.prefix import measure_prefix
        from octavo.bench.record import Recorder

        plan = _plan(args, with_cache, text)
        recorder = Recorder(common.asked_for(args), settings.threads)
        recorder.engine = with_cache.info
        with recorder, common.progress_over("asking", plan.repeat * plan.questions) as advance:
            result = measure_prefix(with_cache, without_cache, plan, advance)
    recorder.samples = {"documents": [sample.as_json() for sample in result.samples]}
    document = {**result.as_json(), "run": recorder.as_json()}
    common.report(
        args,
        document,
        lambda console: _print(console, args, result),
        lambda: _figure(args, result),
    )
    return 0


def _figure(args: argparse.Namespace, result: PrefixResult) -> Figure:
    from octavo.plots.benchmarks import time_bars

    times = {
        "first question": result.cold_ttft.scaled(1e3),
        "later questions": result.warm_ttft.scaled(1e3),
        "without the cache": result.no_cache_ttft.scaled(1e3),
    }
    title = f"{args.model}: time to first token, {result.plan.prefix_len} tokens in common"
    return time_bars(times, title=title, unit="ms")


def _plan(args: argparse.Namespace, session: OfflineSession, text: str | None) -> PrefixPlan:
    from octavo.bench.offline.prefix import PrefixPlan

    document = None
    if text is not None:
        document = tuple(session.loaded.text_engine.tokenizer.encode(text))
    try:
        return PrefixPlan(
            args.prefix_len,
            args.question_len,
            args.questions,
            args.output_len,
            args.repeat,
            session.loaded.config.seed,
            document,
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _print(console: Console, args: argparse.Namespace, result: PrefixResult) -> None:
    plan = result.plan
    title = (
        f"{args.model}: {plan.questions} questions of {plan.question_len} tokens, on each of "
        f"{plan.repeat} documents of {plan.prefix_len}"
    )
    figures: list[tuple[str, Any]] = [
        ("TTFT, first question (cold)", result.cold_ttft),
        ("TTFT, later questions (warm)", result.warm_ttft),
        ("TTFT without the cache", result.no_cache_ttft),
    ]
    rows = [
        [name, f"{each.median * 1e3:.1f} ms", f"{each.min * 1e3:.1f}–{each.max * 1e3:.1f}"]
        for name, each in figures
    ]
    for name, each in (
        ("cold / warm", result.speedup),
        ("all questions, without / with the cache", result.total_speedup),
    ):
        rows.append([name, f"{each.median:.2f}×", f"{each.min:.2f}–{each.max:.2f}"])
    rows.append(["prompt tokens found in the cache", f"{result.hit_rate:.1%}", ""])
    rows.append(["  of the warm questions", f"{result.warm_hit_rate:.1%}", ""])
    rows.append(["same answers with and without", "yes" if result.same_answers else "no", ""])
    common.print_figures(console, title, ["", "median", "min–max"], rows)
