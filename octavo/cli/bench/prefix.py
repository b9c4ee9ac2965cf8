"""``octavo bench prefix``: where prompts begin alike, time to first token, or decoding."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.flags import add_number, add_switch, add_value, from_flags, read_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.bench.offline.prefix import PrefixPlan, PrefixResult
    from octavo.bench.offline.prefix_decode import PrefixDecodeResult
    from octavo.bench.offline.session import OfflineSession

EXAMPLES = """\
examples:
  octavo bench prefix
  octavo bench prefix --prefix-len 2048 --questions 16
  octavo bench prefix --text README.md --prefix-len 512 --json
  octavo bench prefix --at-once --prefix-len 4096 --questions 32 --output-len 64

Many questions about one document, one after the other: the first finds nothing in the prefix cache
(cold), the others find the document (warm). An engine without the cache answers the same, turn by
turn.

With --at-once all questions are asked together, and what is measured is how fast their answers are
decoded; an engine that does not share the reading of the document's KV (--no-shared-prefix-decode)
answers the same, turn by turn.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--prefix-len", "tokens of the document", 1024)
    add_number(parser, "--question-len", "tokens of each question, which follows the document", 32)
    add_number(parser, "--questions", "about each document", 8)
    add_number(parser, "--output-len", "tokens of each answer", 16)
    add_number(parser, "--repeat", "documents, each with questions of its own", 3)
    add_switch(parser, "--at-once", "ask all questions together, and measure decoding")
    add_value(parser, "--text FILE", "the document (default: random tokens)")
    common.add_benchmark_arguments(parser, skip={"enable_prefix_caching", "shared_prefix_decode"})


def run(args: argparse.Namespace) -> int:
    settings = common.engine_args(args)
    setting = "shared_prefix_decode" if args.at_once else "enable_prefix_caching"
    without: dict[str, Any] = {setting: False}
    text = read_text(args.text, "--text") if args.text else None
    with (
        common.open_session(settings) as session,
        common.open_session(replace(settings, **without)) as without_it,
    ):
        from octavo.bench.offline.prefix import measure_prefix
        from octavo.bench.offline.prefix_decode import measure_prefix_decode
        from octavo.bench.record import Recorder

        plan = _plan(args, session, text)
        measure: Callable[..., Any] = measure_prefix_decode if args.at_once else measure_prefix
        num_parts = plan.repeat * (1 if args.at_once else plan.questions)
        with (
            Recorder.of(session, common.asked_for(args)) as recorder,
            terminal.progress_over("asking", num_parts) as advance,
        ):
            result = measure(session, without_it, plan, advance)
    recorder.samples = {"documents": [sample.as_json() for sample in result.samples]}
    document = {**result.as_json(), "run": recorder.as_json()}
    rows = _rows_at_once(result) if args.at_once else _rows_in_turn(result)
    title = (
        f"{args.model}: {plan.questions} questions of {plan.question_len} tokens, on each of "
        f"{plan.repeat} documents of {plan.prefix_len}"
    )
    common.report(
        args,
        document,
        lambda console: common.print_figures(console, title, ["", "median", "min–max"], rows),
        lambda: _figure(args, result),
    )
    return 0


def _plan(args: argparse.Namespace, session: OfflineSession, text: str | None) -> PrefixPlan:
    from octavo.bench.offline.prefix import PrefixPlan

    document = None
    if text is not None:
        document = tuple(session.loaded.text_engine.tokenizer.encode(text))
    try:
        return from_flags(PrefixPlan, args, seed=session.loaded.config.seed, document=document)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _figure(args: argparse.Namespace, result: Any) -> Figure:
    from octavo.plots.benchmarks import time_bars

    plan = result.plan
    if args.at_once:
        what = f"step of {plan.questions} requests"
        times = {
            "the document's KV read once": result.step_seconds,
            "for each request": result.separate_step_seconds,
        }
    else:
        what = "time to first token"
        times = {
            "first question": result.cold_ttft,
            "later questions": result.warm_ttft,
            "without the cache": result.no_cache_ttft,
        }
    title = f"{args.model}: {what}, {plan.prefix_len} tokens in common"
    bars = {name: each.scaled(1e3) for name, each in times.items()}
    return time_bars(bars, title=title, unit="ms")


def _rows_in_turn(result: PrefixResult) -> list[list[str]]:
    rows = []
    for name, each in (
        ("TTFT, first question (cold)", result.cold_ttft.scaled(1e3)),
        ("TTFT, later questions (warm)", result.warm_ttft.scaled(1e3)),
        ("TTFT without the cache", result.no_cache_ttft.scaled(1e3)),
    ):
        rows.append([name, f"{each.median:.1f} ms", f"{each.min:.1f}–{each.max:.1f}"])
    for name, each in (
        ("cold / warm", result.speedup),
        ("all questions, without / with the cache", result.total_speedup),
    ):
        rows.append([name, f"{each.median:.2f}×", f"{each.min:.2f}–{each.max:.2f}"])
    rows.append(["prompt tokens found in the cache", f"{result.hit_rate:.1%}", ""])
    rows.append(["  of the warm questions", f"{result.warm_hit_rate:.1%}", ""])
    rows.append(["same answers with and without", "yes" if result.same_answers else "no", ""])
    return rows


def _rows_at_once(result: PrefixDecodeResult) -> list[list[str]]:
    rows = [
        [name, f"{each.median:,.0f} tok/s", f"{each.min:,.0f}–{each.max:,.0f}"]
        for name, each in (
            ("decoding, the document's KV read once a step", result.decode_tps),
            ("  for each request (--no-shared-prefix-decode)", result.separate_decode_tps),
        )
    ]
    gain = result.speedup
    return [
        *rows,
        ["shared / separate", f"{gain.median:.2f}×", f"{gain.min:.2f}–{gain.max:.2f}"],
        ["KV of a step, read once", f"{result.kv_bytes / 1e6:,.0f} MB", ""],
        ["  for each request", f"{result.separate_kv_bytes / 1e6:,.0f} MB", ""],
        ["same answers both ways", "yes" if result.same_answers else "no", ""],
    ]
