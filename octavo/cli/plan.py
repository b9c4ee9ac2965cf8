"""``octavo plan``: whether a model fits on some hardware, how fast, for how many, at what cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.cli import UsageError, terminal
from octavo.cli.bench.common import positive
from octavo.cli.plan_flags import add_plan_flags, question_of

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.cost.step_cost import StepCost
    from octavo.planner import Plan
    from octavo.planner.sizing import Offer, Search

EXAMPLES = """\
MODEL is a name of the catalogue, a model that is here, a config.json, a folder or a GGUF file;
nothing is downloaded. Hardware is a name of `octavo hardware list`, with how many: h100-sxm:8.

Figures are from ceilings of the hardware and shares of them that engines reach, with the interval
that they lie in nine times out of ten. Exit status: 0 feasible, 2 not.

examples:
  octavo plan llama-3.1-8b --hardware rtx4090 --isl 1024 --osl 256 --concurrency 8
  octavo plan llama-3.3-70b --hardware h100-sxm:4 --rate 5 --slo ttft=500,tpot=50,e2e=10s@p99
  octavo plan qwen3-32b --hardware a100-80,h100-sxm,l40s --cheapest --rate 20 --slo tpot=40
  octavo plan mixtral-8x7b --hardware h100-sxm:2 --profile vllm --memory --roofline
"""

INFEASIBLE = 2
_MOST_OFFERS = 8


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_plan_flags(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--cheapest",
        action="store_true",
        help="the least number of devices that does what is asked, of each of the hardware that "
        "is named, in any layout, with weights as they are, in fp8, and in int4",
    )
    group.add_argument(
        "--most-devices",
        type=positive,
        metavar="N",
        help="with --cheapest: no more than so many (default: 64)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--memory", action="store_true", help="what memory goes to")
    group.add_argument("--roofline", action="store_true", help="what steps go to, by operation")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.most_devices is not None and not args.cheapest:
        raise UsageError("--most-devices says nothing without --cheapest")
    return _run_search(args) if args.cheapest else _run_plan(args)


def _run_plan(args: argparse.Namespace) -> int:
    from octavo.planner.plan import answer
    from octavo.planner.report import cost_json, plan_json

    plan = answer(question_of(args))
    if args.json:
        document = plan_json(plan)
        if args.roofline:
            document["roofline"] = {
                "prefill": cost_json(plan.prefill_cost),
                "decode": cost_json(plan.decode_cost),
            }
        terminal.print_json(document)
    else:
        _print_plan(_console(), plan, args)
    return 0 if plan.is_feasible else INFEASIBLE
