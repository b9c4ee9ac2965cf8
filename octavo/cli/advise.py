"""``octavo advise``: what decides how a model is served here, and what would make it better."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.cli import terminal
from octavo.cli.plan_flags import add_plan_flags, question_of

if TYPE_CHECKING:
    from octavo.planner.answer import Plan
    from octavo.planner.decisions import Decision

EXAMPLES = """\
First the questions that decide, each with the number that answers it; then what would help, what
helps most first, each tried as a plan of its own: the gain is in figures before and after.

examples:
  octavo advise
  octavo advise llama-3.1-70b --hardware a100-80-sxm:4 --rate 2 --slo ttft=1s,tpot=50
  octavo advise qwen3-8b --hardware rtx4090 --concurrency 16 --profile llama.cpp --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_plan_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from octavo.planner.answer import answer
    from octavo.planner.decisions import decisions
    from octavo.planner.report import deployment_json

    plan = answer(question_of(args))
    decided = decisions(plan.verdict)
    if args.json:
        terminal.print_json(
            {
                "model": plan.deployment.spec.name,
                "deployment": deployment_json(plan.deployment),
                "feasible": plan.is_feasible,
                "decisions": [each.as_json() for each in decided],
                "advice": [each.as_json() for each in plan.advice],
            }
        )
    else:
        _print(plan, decided)
    return 0


def _print(plan: Plan, decided: list[Decision]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for decision in decided:
        console.print(f"{decision.question} [bold]{'yes' if decision.answer else 'no'}[/bold]")
        console.print(f"  {decision.because}", markup=False)
        console.print(f"  → {decision.then}", markup=False)
    console.print("[bold]What would help[/bold]")
    for number, advice in enumerate(plan.advice, start=1):
        console.print(f"{number}. {advice.what}", markup=False)
        console.print(f"   {advice.why}\n   {advice.gain}", markup=False)
    if not plan.advice:
        console.print("nothing that was tried")
