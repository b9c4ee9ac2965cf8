"""``octavo spec``: estimates the speed-up of speculative decoding from acceptance and costs."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from octavo.cli import UsageError, terminal
from octavo.cli.flags import (
    above_zero,
    add_json_flag,
    add_value,
    non_negative,
    probability,
    real_number,
    whole_number,
)
from octavo.speculation.analysis import (
    MAX_LENGTH,
    BatchStepCost,
    Forecast,
    acceptance_probability,
    linear_step,
    operations_factor,
    rates_of_shares,
)

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.cost.rank_model import RankModel
    from octavo.cost.step_cost import StepModel

EXAMPLES = """\
A step with k draft tokens brings those before the first rejected one, and one more. Give their
acceptance in one of four ways. alpha is the probability that a draft token is accepted if all
before it were; the acceptance rate that servers report is another figure, and less.

Costs are relative to a plain step: --cost-ratio is that of drafting a token, --row-cost that of
verifying one. While memory is the bound, a few more rows cost little; `octavo bench spec` measures
it. With --model, steps are those of a model on a machine of --bandwidth and --compute (a roofline:
the least time that a step can take).

examples:
  octavo spec --alpha 0.8 --cost-ratio 0.05
  octavo spec --acceptance-length 2.4 --k 4 --row-cost 0.07 --batch 8
  octavo spec --rates 0.7,0.6,0.5 --json
  octavo spec --alpha 0.7 --model smollm2-135m --bandwidth 30 --compute 300 --batch 4
"""

# The default of --row-cost with --batch: eight rows in 1.5 steps.
_ROW_COST_OF_BATCHES = 0.07
_SHOWN = 16

_cost = real_number("number of at least 0", lambda value: 0 <= value < math.inf)


def configure(parser: argparse.ArgumentParser) -> None:
    _add_acceptance(parser)
    add_value(
        parser,
        "--cost-ratio C",
        "time to draft a token, relative to a plain step (default: 0, as for n-grams)",
        _cost,
        default=0.0,
    )
    add_value(parser, "--k K", "draft tokens of a step (default: the best number)", _length)
    add_value(parser, "--batch B", "requests that share a step (default: 1)", whole_number)
    add_value(
        parser,
        "--row-cost R",
        "time that each further row of a step adds, relative to a step of one row (default: "
        f"0, or {_ROW_COST_OF_BATCHES} with --batch, which is eight rows in 1.5 steps)",
        _cost,
    )
    _add_roofline(parser)
    add_json_flag(parser)


def _add_acceptance(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    add_value(group, "--alpha A", "acceptance probability of each position", probability)
    add_value(
        group,
        "--acceptance-length L",
        "mean tokens of a step with --k draft tokens, the one after them included",
        _cost,
    )
    add_value(
        group,
        "--rates A0,A1,…",
        "acceptance probabilities by position, each given that those before are accepted",
        _probabilities,
    )
    add_value(
        group,
        "--accepted-by-position S0,S1,…",
        "shares of all drafts that are accepted up to each position, as servers report them",
        _probabilities,
    )


def _add_roofline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("roofline, in place of --row-cost")
    add_value(group, "--model MODEL", "model of the steps; it is not loaded")
    add_value(group, "--bandwidth GB/S", "memory bandwidth of the machine", above_zero)
    add_value(group, "--compute GOP/S", "operations of the machine: 10^9 a second", above_zero)
    add_value(
        group,
        "--context N",
        "context of each request, in tokens (default: %(default)s)",
        non_negative,
        default=512,
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    try:
        forecast = Forecast(_rates(args), args.cost_ratio, args.batch or 1, _step_cost(args))
        document = _document(args, forecast)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.json:
        terminal.print_json(document)
    else:
        _print(terminal.console(), args, document)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.acceptance_length is not None and args.k is None:
        raise UsageError("--acceptance-length needs --k: give the draft tokens of those steps")
    if args.model is None:
        if args.bandwidth or args.compute:
            raise UsageError("--bandwidth and --compute need --model: give all three, or none")
    elif args.row_cost is not None:
        raise UsageError("--row-cost and --model both give the cost of a row: leave one out")
    elif not (args.bandwidth and args.compute):
        raise UsageError(
            "--model needs --bandwidth and --compute; `octavo bench latency` measures both"
        )


def _rates(args: argparse.Namespace) -> tuple[float, ...]:
    if args.rates is not None or args.accepted_by_position is not None:
        rates = args.rates or rates_of_shares(args.accepted_by_position)
        if args.k is not None and args.k > len(rates):
            raise UsageError(f"--k {args.k} is more than the {len(rates)} positions that are given")
        return tuple(rates)
    return (_alpha(args),) * MAX_LENGTH


def _alpha(args: argparse.Namespace) -> float:
    if args.alpha is not None:
        alpha: float = args.alpha
        return alpha
    return acceptance_probability(args.acceptance_length, args.k)


def _row_cost(args: argparse.Namespace) -> float | None:
    """The cost of a further row; None if a roofline gives it."""
    if args.model is not None or args.row_cost is not None:
        row_cost: float | None = args.row_cost
        return row_cost
    return _ROW_COST_OF_BATCHES if args.batch is not None else 0.0


def _step_cost(args: argparse.Namespace) -> BatchStepCost:
    row_cost = _row_cost(args)
    if row_cost is not None:
        return linear_step(row_cost)
    from octavo.cost.loaded_model import live_rank_model
    from octavo.cost.work import Span
    from octavo.models.checkpoint import open_checkpoint
    from octavo.models.footprint import matrices, native_kv_bytes_per_token, weight_types

    checkpoint = open_checkpoint(terminal.resolve(args.model))
    config = checkpoint.config()
    weights = matrices(config, weight_types(checkpoint, config))
    model = live_rank_model(config, weights, native_kv_bytes_per_token(config))
    roofline = _roofline(model, args.bandwidth * 1e9, args.compute * 1e9)

    def seconds(batch: int, rows: int) -> float:
        return roofline.cost([Span.verifying(args.context, rows - 1)] * batch).total.value

    return seconds


def _roofline(model: RankModel, bandwidth: float, compute: float) -> StepModel:
    """The roofline of a machine that is known by two figures."""
    from octavo.cost.efficiency import IDEAL
    from octavo.cost.hardware import Device
    from octavo.cost.step_cost import StepModel

    machine = Device(
        name="as given",
        kind="cpu",
        memory_bytes=0.0,
        memory_bandwidth=bandwidth,
        peaks={"fp32": compute},
    )
    return StepModel(model, machine, IDEAL)


def _document(args: argparse.Namespace, forecast: Forecast) -> dict[str, Any]:
    best = forecast.best_length
    length = best if args.k is None else args.k
    tokens = forecast.tokens(length)
    is_one_rate = len(set(forecast.rates)) == 1
    last = min(len(forecast.rates), max(_SHOWN, length, best))
    return {
        "alpha": forecast.rates[0] if is_one_rate else None,
        "cost_ratio": args.cost_ratio,
        "batch": forecast.batch,
        "row_cost": _row_cost(args),
        "k": length,
        "expected_tokens": tokens,
        "expected_accepted": tokens - 1,
        "acceptance_rate": (tokens - 1) / length if length else None,
        "speedup": forecast.speedup(length),
        "operations_factor": operations_factor(tokens, length),
        "best_k": best,
        "best_speedup": forecast.speedup(best),
        "break_even_batch": forecast.break_even_batch(length),
        "table": [
            {
                "k": k,
                "expected_tokens": forecast.tokens(k),
                "rows_cost": _verifying(forecast, k),
                "speedup": forecast.speedup(k),
            }
            for k in range(1, last + 1)
        ],
    }


def _verifying(forecast: Forecast, length: int) -> float:
    """The cost of a step with drafts, relative to one without."""
    batch, step_cost = forecast.batch, forecast.step_cost
    return step_cost(batch, length + 1) / step_cost(batch, 1)


# -- for people -----------------------------------------------------------------------------------


def _print(console: Console, args: argparse.Namespace, document: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("k", "tokens a step", "step with it", "speed-up", ""):
        table.add_column(name, justify="right" if name else "left")
    best, asked = document["best_k"], args.k
    shown = {best - 1, best, best + 1, asked, *range(1, 9), 12, 16}
    for row in document["table"]:
        if row["k"] not in shown:
            continue
        mark = "best" if row["k"] == best else "asked for" if row["k"] == asked else ""
        table.add_row(
            str(row["k"]),
            f"{row['expected_tokens']:.3f}",
            f"{row['rows_cost']:.2f} ×",
            f"{row['speedup']:.3f} ×",
            mark,
        )
    console.print(table)
    for line in _conclusions(document):
        console.print(line, markup=False)


def _conclusions(document: dict[str, Any]) -> list[str]:
    best, batch = document["best_k"], document["batch"]
    requests = "a single request" if batch == 1 else f"a batch of {batch}"
    if best == 0:
        lines = [f"Drafts do not pay for {requests}: plain decoding is faster than any length."]
        if document["alpha"] is not None and document["alpha"] <= document["cost_ratio"]:
            lines.append(
                "They pay only if alpha is more than the cost of a draft token: alpha > C."
            )
    else:
        tokens = "1 draft token" if best == 1 else f"{best} draft tokens"
        lines = [f"Best for {requests}: {tokens} a step, {document['best_speedup']:.2f} ×."]
    if document["k"] and document["row_cost"] != 0:  # else batches make no difference
        even = document["break_even_batch"]
        saying = "at no batch up to 1024" if even is None else f"from a batch of {even} on"
        lines.append(f"With k = {document['k']}, plain decoding is as fast {saying}.")
    return lines


# -- values ---------------------------------------------------------------------------------------


def _probabilities(text: str) -> list[float]:
    values = [probability(part) for part in text.split(",")]
    if len(values) > MAX_LENGTH:
        raise argparse.ArgumentTypeError(f"{len(values)} positions are more than {MAX_LENGTH}")
    return values


def _length(text: str) -> int:
    length = whole_number(text)
    if length > MAX_LENGTH:
        raise argparse.ArgumentTypeError(f"{length} is more than {MAX_LENGTH} tokens at once")
    return length
