"""``octavo quantize``: a smaller model, and what was lost and gained."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError, OctavoError
from octavo.base.optional_deps import need_torch
from octavo.bench.child_processes import ending_on_sigterm
from octavo.cli import UsageError, terminal
from octavo.cli.bench.common import add_plot_flag, save_plots
from octavo.cli.flags import add_json_flag, add_number, add_switch, add_value, from_flags, read_text
from octavo.cli.parser import rarely
from octavo.system.machine import keep_openmp_patient

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.quantize.methods import QuantizeRequest
    from octavo.quantize.quantization_job import Progress

# As octavo.quantize.methods has them, which takes a second to import.
METHODS = ("gptq", "awq", "smoothquant", "rtn", "autoround", "qat", "gguf", "fp8", "nf4")
# Fields of a QuantizeRequest that not every method has.
_SCHEME = ("bits", "group_size", "symmetric", "format", "mix_bits")
_CALIBRATION = ("calibration", "calibration_tokens")
_TRAINING = ("train_tokens", "train_codes")
FORMATS = ("gptq", "compressed-tensors", "awq", "fp8", "bnb", "gguf")

EXAMPLES = """\
OUT becomes a Hugging Face folder, or with --method gguf a file; it is not overwritten. Embeddings
and the head stay as they are in folders. Without --calibration a text of octavo's own is looked at.

With --report the new model and the old one predict a text, and run in turns. --compare makes
several models, OUT-METHOD each; a type of GGUF files is a method of its own there. --plot draws
either: bits against KL divergence, and bytes against speed.

With --target-bpw each matrix gets the bits, or the type of GGUF files, that are worth most: what
they cost is measured first, on the text. All tensors count, embedding and head too. Of folders,
those of compressed-tensors hold such a mix; --mix-bits 4,8,16 keeps to what vLLM runs (on a CPU:
4,16).

methods:
  gptq         integers that make up for each other's errors on a text
  awq          integers with zeros, after channels were scaled so that they round better
  smoothquant  integers of 8 bits, for activations of 8 bits whose outliers were scaled down
  rtn          integers to the nearest, with scales of least error on a text
  autoround    integers learned for a layer as a whole on a text: slow, for 2 bits
  qat          integers whose scales the whole model is trained for: slowest, for 2 and 3 bits
  gguf         the types of llama.cpp, with importance from a text (see --type)
  fp8          floats of 8 bits (e4m3), rounded as gptq does; --format fp8: in blocks
  nf4          the 4 bits of QLoRA, in blocks of 64, rounded as gptq does

examples:
  octavo quantize ./Qwen3-0.6B ./qwen3-4bit --method gptq --report
  octavo quantize ./Qwen3-0.6B ./qwen3.gguf --method gguf --type Q4_K_M
  octavo quantize ./Qwen3-0.6B ./qwen3.gguf --method gguf --target-bpw 5.25 --report
  octavo quantize ./Qwen3-0.6B ./qwen3 --compare rtn,gptq,q4_k_m,nf4,fp8
  octavo quantize ./Llama-3.2-1B ./llama-awq --method gptq --format awq --calibration chats.txt
  octavo quantize ./Llama-3.2-1B ./llama-rows --method gptq --group-size -1 --rotate
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="alias, folder, .gguf file or hub id")
    parser.add_argument("out", metavar="OUT", help="the folder or file to make")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--method", choices=METHODS)
    add_value(which, "--compare M,M,...", "make one with each, and judge them")
    add_value(parser, "--bits B", "of an integer, 2 to 8 (default: 4)", int)
    add_value(
        parser,
        "--group-size G",
        "inputs that share a scale, -1 for a whole row (default: the most of 128, 64 and 32 "
        "that rows are made of)",
        int,
    )
    parser.add_argument(
        "--symmetric",
        action="store_true",
        default=None,
        help="no zeros but the middle (default, not of awq)",
    )
    parser.add_argument(
        "--asymmetric", action="store_false", dest="symmetric", help="a zero for each group"
    )
    add_value(parser, "--type TYPE", "of method gguf (default: Q4_K_M)")
    add_value(
        parser,
        "--target-bpw X",
        "bits per weight of the whole model, at most: a mix of bits or types by what each "
        "matrix is worth (gptq, rtn, awq, autoround, qat, gguf)",
        float,
    )
    add_value(
        parser,
        "--mix-bits B,B,...",
        "what a folder's matrices may have then (default: 2,3,4,5,6,8,16)",
        _integers,
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="of the checkpoint (default: the usual one of the method)"
    )
    add_value(
        parser,
        "--calibration FILE",
        "what to look at: a text in UTF-8, or .jsonl with text or messages in each line",
        Path,
    )
    add_number(parser, "--calibration-tokens", "look at no more of it")
    add_number(
        *(parser, "--train-tokens"),
        "of method qat: train on so many in all, going through the text as often as it takes "
        "(default: 524,288, or the text eight times)",
    )
    add_switch(
        parser,
        "--train-codes",
        "of method qat: train codes too, not scales alone; takes more memory, and more tokens",
    )
    add_switch(parser, "--no-calibration", "look at none: rtn, gguf, fp8 and nf4 can do without")
    add_switch(parser, "--requantize", "also of a model that is quantized already")
    add_switch(
        parser,
        "--rotate",
        "rotate the model first, which spreads large weights: for gptq with --group-size -1",
    )
    add_switch(parser, "--report", "measure what was lost and gained")
    add_value(parser, "--report-text FILE", "what to predict for it (default: octavo's own)")
    add_plot_flag(parser)
    add_json_flag(parser)
    rarely(parser, "--symmetric", "--asymmetric", "--mix-bits", "--calibration-tokens", "--rotate")
    rarely(parser, "--train-tokens", "--train-codes", "--no-calibration", "--requantize")
    rarely(parser, "--report-text")


def run(args: argparse.Namespace) -> int:
    is_measured = args.report or args.compare is not None
    if args.plot and not is_measured:
        raise UsageError("--plot draws what was measured: say --report or --compare with it")
    keep_openmp_patient()  # before PyTorch is imported
    need_torch("quantizing a model")
    text = args.report_text and (args.report_text, read_text(args.report_text, "--report-text"))
    path = terminal.resolve(args.model)
    with terminal.spinner("starting"):
        from octavo.models.checkpoint import open_checkpoint
        from octavo.quantize.quantization_job import make
        from octavo.sources.open import load_tokenizer
    if args.compare is None:
        plan = [(Path(args.out), wanted_of(args, args.method))]
    else:
        plan = [(_beside(args.out, name), wanted_of(args, name)) for name in _names(args.compare)]
    checkpoint, tokenizer = open_checkpoint(path), load_tokenizer(path)
    failures = Failures(is_kept=args.compare is not None)
    made = []
    with ending_on_sigterm():
        for out, wanted in plan:
            with failures.of(str(out)), progress_bar() as progress:
                made.append(make(checkpoint, tokenizer, out, wanted, progress, terminal.say))
        if args.rotate and checkpoint.config().tie_embeddings:
            terminal.say("the head was the embedding; rotated they differ, and both are written")
        rows = [{**each.as_json(), "report": None} for each in made]
        if is_measured and rows:
            _judge(args.model, rows, text, failures)
    if args.json:
        compared = {"rows": rows, "failed": failures.reasons}
        terminal.print_json(compared if args.compare else rows[0])
    elif rows:
        print_rows(rows)
        for row in rows:
            if "choice" in row:
                print_choice(row)
    # Last, so that a picture that cannot be written costs no measurement.
    if args.plot and any(row["report"] for row in rows):
        save_plots(args, lambda: _figure(args.model, [row for row in rows if row["report"]]))
    return failures.tell()


class Failures:
    """Keeps the failures of a comparison by name, so that the other methods go on; outside of one
    they are raised.

    A comparison takes hours: a method that does not fit the model must not cost all of them.
    """

    def __init__(self, is_kept: bool):
        self._is_kept = is_kept
        self.reasons: dict[str, str] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._is_kept or os.environ.get("OCTAVO_DEBUG") == "1":
                raise
            kind = "" if isinstance(error, OctavoError) else f"{type(error).__name__}: "
            self.reasons[name] = kind + " ".join(str(error).split())
            terminal.say(f"{name} failed: {self.reasons[name]}")

    def tell(self) -> int:
        """Return the exit status; says again what failed, after all other output."""
        for name, reason in self.reasons.items():
            terminal.say(f"octavo: error: {name}: {reason}")
        return 1 if self.reasons else 0


def _figure(model: str, rows: Sequence[Mapping[str, Any]]) -> Figure:
    from octavo.plots.quantization import quantization_costs
    from octavo.quality.tradeoffs import tradeoffs

    points = tradeoffs({"rows": list(rows)})
    title = f"{model}, quantized: {points[0].tokens:,} tokens of {points[0].text}"
    return quantization_costs(points, title=title)


def wanted_of(args: argparse.Namespace, method: str) -> QuantizeRequest:
    """Return the request for one of the methods; in a comparison, types of GGUF files are such."""
    from octavo.quantization.gguf_mixes import MIXES
    from octavo.quantize import methods

    type = args.type
    if args.compare is not None and method.upper() in MIXES:
        method, type = "gguf", method.upper()
    known = methods.METHODS.get(method)
    skipped: set[str] = set()
    if args.compare is not None and known is not None:
        # Settings of a comparison are for the methods that have a choice.
        for names, has_choice in (
            (_SCHEME, known.has_scheme),
            (_CALIBRATION, known.calibrated),
            (_TRAINING, known.trains),
            (("target_bpw",), known.has_scheme or (method == "gguf" and type is None)),
        ):
            skipped.update(() if has_choice else names)
    try:
        return from_flags(
            methods.QuantizeRequest,
            args,
            skip=skipped,
            method=method,
            type=type,
            calibrate=not args.no_calibration,
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _integers(text: str) -> tuple[int, ...]:
    """Parse ``4,8``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 4,8") from None


def _names(compare: str) -> list[str]:
    names = [name.strip() for name in compare.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise UsageError(
            f"--compare {compare!r}: give methods, each once, with commas between them"
        )
    return names


def _beside(out: str, name: str) -> Path:
    """Return the path of the model that a method makes in a comparison."""
    from octavo.quantization.gguf_mixes import MIXES

    suffix = ".gguf" if name == "gguf" or name.upper() in MIXES else ""
    return Path(f"{out.removesuffix('.gguf')}-{name.lower()}{suffix}")


def _judge(
    base: str, rows: Sequence[dict[str, Any]], text: tuple[str, str] | None, failures: Failures
) -> None:
    """Report on each model in its row; models that cannot be judged get no report."""
    from octavo.quality.report import QuantizationJudge, built_in_text

    with (
        failures.of("the report"),
        QuantizationJudge(base, text or built_in_text(), say=terminal.say) as judge,
    ):
        for row in rows:
            with failures.of(f"the report on {row['out']}"):
                row["report"] = judge.report(row["out"]).as_json()


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A callback that takes (work, done, total): a bar on a terminal, elsewhere a line at times."""
    if not terminal.can_animate():
        yield terminal.LineProgress().update
        return
    with terminal.bar(
        lambda rich: (
            *(rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()),
            rich.TimeElapsedColumn(),
        ),
        transient=False,
    ) as update:
        update(description="starting")
        yield lambda what, done, total: update(description=what, completed=done, total=total)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    reports = [row["report"] for row in rows if row["report"]]
    table = Table(box=None, pad_edge=False)
    columns = ["model", "format", "bits", "size", "made in"]
    if reports:
        columns += ["perplexity", "KL", "KL P99", "same top", "KL served"]
        columns += ["decode tok/s", "prefill tok/s"]
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "format") else "right")
    if reports:
        table.add_row(*_of_base(reports[0]))
    for row in rows:
        table.add_row(*_cells(row))
    # Without a terminal there is no width to keep to.
    width = None if sys.stdout.isatty() else 400
    console = terminal.console(width=width, wraps=True)
    console.print(table)
    if reports:
        console.print(
            f"{reports[0]['tokens']:,} tokens of {reports[0]['text']}; KL divergence from the "
            "original in nats, with exact activations (int16) and KV, and as the model is served "
            "by default; tokens/s of one stream, in turns with it",
            style="dim",
        )


def print_choice(row: Mapping[str, Any]) -> None:
    """Print how many matrices of each kind got which bits or type."""
    from rich.table import Table

    kinds: Mapping[str, Mapping[str, int]] = row["choice"]["kinds"]
    names = dict.fromkeys(name for counts in kinds.values() for name in counts)
    table = Table(box=None, pad_edge=False)
    table.add_column("matrices")
    for name in names:
        table.add_column(name, justify="right")
    for kind, counts in kinds.items():
        table.add_row(kind, *(str(counts.get(name, "")) for name in names))
    console = terminal.console(wraps=True)
    console.print(f"\n{row['out']}: expected KL {row['choice']['expected_kl']:.4f}", soft_wrap=True)
    console.print(table)


def _of_base(report: Mapping[str, Any]) -> list[str]:
    speeds = f"{report['base_decode_tps']:,.0f}", f"{report['base_prefill_tps']:,.0f}"
    return ["the original", "", "", "", "", f"{report['base_perplexity']:.3f}", *[""] * 4, *speeds]


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [
        row["out"],
        row["format"],
        f"{row['bits_per_weight']:.2f}",
        terminal.format_bytes(row["bytes"]),
        f"{row['elapsed_s']:,.0f} s",
    ]
    report = row["report"]
    if report:
        cells += [
            f"{report['perplexity']:.3f}",
            f"{report['kl_mean']:.4f}",
            f"{report['kl_p99']:.3f}",
            f"{report['same_top']:.1%}",
            f"{report['served_kl_mean']:.4f}",
            f"{report['decode_tps']:,.0f}",
            f"{report['prefill_tps']:,.0f}",
        ]
    return cells
