"""``octavo perplexity``: how well a model predicts a text, and how far it is from another run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.base.errors import BenchmarkError
from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.engine_flags import engine_kwargs
from octavo.cli.flags import add_number, add_value, read_text

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.quality.logit_file import LogitFile

# The windows decide these.
_SKIPPED = {
    *("max_model_len", "enable_prefix_caching", "seed"),
    *("max_queued_requests", "max_queued_tokens"),
}

EXAMPLES = """\
The text is cut into windows of --ctx tokens. BOS is put at the beginning of each where the model
wants it, and the tokens of its second half are scored, as llama.cpp's llama-perplexity does.

A base holds two bytes for each token of the vocabulary and each scored token of the text.
With --kl-base, --ctx, --score and --max-tokens are those of the base.

examples:
  octavo perplexity --text wiki.test.raw
  octavo perplexity gemma3-270m --text README.md --ctx 256 --score all --json
  octavo perplexity --text wiki.test.raw --max-tokens 20000 --kernels reference --save-base f32.base
  octavo perplexity --text wiki.test.raw --kl-base f32.base --kv-cache-dtype int8
  octavo perplexity --text wiki.test.raw --ctx 32768 --window 1020 --attention-sinks 4
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--text FILE", "a text in UTF-8", required=True)
    add_number(
        *(parser, "--ctx"),
        "tokens of a window, which is the engine's max_model_len, but with --window or "
        "--context-shift (default: 512)",
    )
    parser.add_argument(
        "--score",
        choices=("half", "all"),
        help="which tokens of a window are scored: all but its first half, or all but the first "
        "(default: half)",
    )
    add_number(parser, "--max-tokens", "take only so many tokens of the text")
    base = parser.add_mutually_exclusive_group()
    add_value(base, "--kl-base FILE", "compare with the run that was saved in a file")
    add_value(base, "--save-base FILE", "save the run in a file, for --kl-base")
    common.add_benchmark_arguments(parser, skip=_SKIPPED, plot=False)


def run(args: argparse.Namespace) -> int:
    engine = engine_kwargs(args)
    text = read_text(args.text, "--text")
    from octavo.bench.record import Recorder
    from octavo.quality.logit_file import LogitFile
    from octavo.quality.perplexity import engine_args, measure
    from octavo.quality.windows import cut, tokenize

    base = None if args.kl_base is None else LogitFile(args.kl_base)
    settings = choose_settings(args, base)
    with common.open_session(engine_args(args.model, settings["ctx"], **engine)) as session:
        text_engine = session.loaded.text_engine
        token_ids, bos_token_id = tokenize(text, text_engine.tokenizer)
        windows = cut(token_ids, bos_token_id=bos_token_id, **settings)
        asked = {"text": args.text, **settings, "kl_base": args.kl_base, "engine": engine}
        with Recorder(asked, engine.get("threads")) as recorder, progress_bar() as progress:
            recorder.engine = session.info
            result = measure(
                text_engine,
                windows,
                model=describe(args.model, session.info),
                base=base,
                save_base=args.save_base,
                progress=progress,
            )
        document = {
            **result.as_json(),
            "model": args.model,
            "text": args.text,
            "base": base and {"file": args.kl_base, "model": base.header.model},
            "engine": session.info,
            "run": recorder.as_json(),
        }
    common.report(args, document, lambda console: print_result(document, console))
    return 0


def choose_settings(args: argparse.Namespace, base: LogitFile | None) -> dict[str, Any]:
    """Return how the text is cut: as the flags say, else as for the base."""
    from octavo.quality.perplexity import DEFAULT_CTX
    from octavo.quality.windows import check_settings

    default: dict[str, Any] = {"ctx": DEFAULT_CTX, "score": "half", "max_tokens": None}
    if base is not None:
        header = base.header
        num_tokens = header.num_windows * header.ctx
        default = {"ctx": header.ctx, "score": header.score, "max_tokens": num_tokens}
    settings = {
        name: value if getattr(args, name) is None else getattr(args, name)
        for name, value in default.items()
    }
    try:
        check_settings(**settings)
    except BenchmarkError as error:
        raise UsageError(str(error)) from error
    return settings


def describe(model: str, engine: Mapping[str, Any]) -> str:
    """Return the name that a base gives to the run that made it."""
    return f"{model}, {engine['kernels']} kernels, {engine['dtype']}, KV in {engine['kv_dtype']}"


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, float], None] | None]:
    """Tokens scored and the perplexity so far, on a terminal."""
    if not terminal.can_animate():
        yield None
        return
    with terminal.bar(
        lambda rich: (
            *(rich.TextColumn("scoring"), rich.BarColumn(), rich.MofNCompleteColumn()),
            rich.TextColumn("{task.description}"),
        )
    ) as update:
        update(completed=0)
        yield lambda done, total, perplexity: update(
            completed=done,
            total=total,
            description=f"perplexity {perplexity:.4f}" if done else "",
        )


def print_result(document: Mapping[str, Any], console: Console) -> None:
    windows = f"{document['num_windows']:,} windows of {document['ctx']:,}"
    title = f"{document['model']}: {document['tokens']:,} tokens scored, in {windows}"
    rows = [
        _estimate("perplexity", document, "perplexity", "stderr", "{:.4f}"),
        ("tokens/s", f"{document['tokens_per_s']:,.0f}", ""),
    ]
    common.print_figures(console, title, ("", "", "±"), rows)
    if document["base"] is not None:
        title = f"against {document['base']['model']} ({document['base']['file']})"
        common.print_figures(console, title, ("", "", "±"), _comparison(document))


def _comparison(document: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    kl = "{:.3g}"
    return [
        _estimate("KL divergence, mean", document, "kl_mean", "kl_stderr", kl),
        ("KL divergence, median", kl.format(document["kl_median"]), ""),
        ("KL divergence, P90", kl.format(document["kl_p90"]), ""),
        ("KL divergence, P99", kl.format(document["kl_p99"]), ""),
        ("KL divergence, most", kl.format(document["kl_max"]), ""),
        _estimate("same most probable token", document, "same_top", None, "{:.2%}"),
        _estimate("perplexity of the base", document, "base_perplexity", None, "{:.4f}"),
        _estimate("ΔPPL", document, "delta_ppl", None, "{:+.4f}"),
        _estimate("PPL / base PPL", document, "ppl_ratio", None, "{:.5f}"),
        _estimate("Δp of the text's tokens", document, "delta_p_mean", "delta_p_stderr", "{:+.3%}"),
        ("Δp of the text's tokens, RMS", f"{document['delta_p_rms']:.3%}", ""),
    ]


def _estimate(
    title: str, document: Mapping[str, Any], name: str, stderr_name: str | None, form: str
) -> tuple[str, str, str]:
    stderr = document[stderr_name or f"{name}_stderr"]
    shown = "" if stderr is None else form.replace("+", "").format(stderr)
    return title, form.format(document[name]), shown
