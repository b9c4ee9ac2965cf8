"""``octavo advise``: what decides how a model is served here, and what would make it better."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.cli import UsageError, terminal
from octavo.cli.bench.common import open_session
from octavo.cli.calibrate import warn_if_busy
from octavo.cli.engine_flags import engine_kwargs
from octavo.cli.flags import add_json_flag, add_switch
from octavo.cli.plan_flags import add_plan_flags, question_of

if TYPE_CHECKING:
    from octavo.bench.offline.advice_study import TrialOutcome, TriedAdvice
    from octavo.planner.advice import Advice
    from octavo.planner.answer import Plan
    from octavo.planner.decisions import ServingDecision
    from octavo.settings.engine import EngineArgs

EXAMPLES = """\
First the questions that decide, each with the number that answers it; then what would help, what
helps most first, each tried as a plan of its own: the gain is in figures before and after.

With --measure, what can be tried with the model at hand, on this machine, is: the same requests on
the engine as it is and on a changed one, in turns. Nothing else should run meanwhile.

examples:
  octavo advise
  octavo advise smollm2-135m --concurrency 8 --measure
  octavo advise llama-3.1-70b --hardware a100-80-sxm:4 --rate 2 --slo ttft=1s,tpot=50
  octavo advise qwen3-8b --hardware rtx4090 --concurrency 16 --profile llama.cpp --json
"""


# What a plan may be about, and an engine of this version cannot be.
_ELSEWHERE = ("tp", "pp", "ep", "dp", "dtype", "quantization")
_SECONDS = 30.0  # that all trials together may take, about, beside loading


def configure(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    add_switch(
        parser,
        "--measure",
        "try out what can be tried here: needs --hardware auto, and takes about a minute "
        "with a small model",
    )
    parser.add_argument(
        "--try",
        dest="candidates",
        action="append",
        default=[],
        metavar="MODEL",
        help="with --measure: the same model in other bits, to be tried, too; may be repeated",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from octavo.bench.offline.advice_study import TriedAdvice
    from octavo.planner.answer import answer
    from octavo.planner.decisions import decisions
    from octavo.planner.report import deployment_json

    _check(args)
    question = question_of(args)
    plan = answer(question)
    decided = decisions(plan.verdict)
    tried = _tried(args, plan) if args.measure else [TriedAdvice(each) for each in plan.advice]
    if args.json:
        terminal.print_json(
            {
                "model": plan.deployment.spec.name,
                "deployment": deployment_json(plan.deployment),
                "feasible": plan.is_feasible,
                "decisions": [each.as_json() for each in decided],
                "advice": [each.as_json() for each in tried],
            }
        )
    else:
        _print(tried, decided)
    return 0


def _check(args: argparse.Namespace) -> None:
    """UsageError where there is nothing here to be measured."""
    if not args.measure:
        if args.candidates:
            raise UsageError("--try says nothing without --measure")
        return
    if args.hardware.lower() != "auto":
        raise UsageError(
            f"--measure runs the model on this machine: it needs --hardware auto, not "
            f"{args.hardware}"
        )
    if args.profile != "octavo":
        raise UsageError(f"--measure runs octavo's own engine, not {args.profile}")
    for name in _ELSEWHERE:
        if getattr(args, name) is not None:
            raise UsageError(
                f"--measure runs the model as its file is, on one device: leave out --{name}"
            )


# -- measured -------------------------------------------------------------------------------------


def _tried(args: argparse.Namespace, plan: Plan) -> list[TriedAdvice]:
    """Try all advice that can be tried here, and changes that no formula predicts; keep those that
    helped. The advice that helps most comes first."""
    from octavo.bench.offline.advice_study import (
        AdviceLoad,
        AdviceStudy,
        advice_without_formula,
        settings_for,
    )

    traffic = plan.traffic
    load = AdviceLoad(max(1, round(_under_way(plan))), traffic.input_len, traffic.output_len)
    longest = plan.deployment.settled.max_model_len
    settings = settings_for(_engine_args(args), load, longest)
    predicted = [*plan.advice, *(_candidate(plan, each) for each in args.candidates)]
    others = advice_without_formula(settings, load)
    warn_if_busy()
    with open_session(settings) as session:
        study = AdviceStudy(session, load, _SECONDS / len([*predicted, *others]))
        with terminal.progress_over("trying", len(predicted) + len(others)) as advance:
            tried = []
            for each in (*predicted, *others):
                tried.append(study.tried(each))
                advance()
    found = tried[: len(predicted)]
    found += [each for each in tried[len(predicted) :] if each.outcome and each.outcome.helps]
    return sorted(found, key=lambda each: each.order)


def _under_way(plan: Plan) -> float:
    """Return the number of requests at once; if none is answered, the number that is asked for."""
    if plan.traffic.rate is None or plan.service is None:
        return plan.traffic.concurrency or 1
    return plan.service.streams.value


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    """The engine that is asked about, as a server has it."""
    from octavo.settings.engine import EngineArgs

    given = engine_kwargs(args)
    if args.kv_cache_dtype is not None:
        given["kv_cache_dtype"] = args.kv_cache_dtype
    return EngineArgs.from_kwargs(args.model, **given).serving()


def _candidate(plan: Plan, model: str) -> Advice:
    """Make an advice of another file of the model: its gain is predicted from the weights' size."""
    from octavo.planner.advice import Advice, AdviceTrial, gain_of
    from octavo.planner.answer import answer
    from octavo.planner.figures import gib

    base = answer(replace(plan.question, measured=None))
    after = answer(replace(plan.question, model=model, measured=None))
    sizes = [gib(each.deployment.memory.weights_bytes) for each in (base, after)]
    _, gain = gain_of(base.verdict, after.verdict)
    why = f"its weights take {sizes[1]}, and not {sizes[0]}"
    return Advice(f"run {model}", why, gain or "none is predicted", AdviceTrial({"model": model}))


# -- for people -----------------------------------------------------------------------------------


def _print(tried: list[TriedAdvice], decided: list[ServingDecision]) -> None:

    console = terminal.console()
    for decision in decided:
        console.print(f"{decision.question} [bold]{'yes' if decision.answer else 'no'}[/bold]")
        console.print(f"  {decision.because}", markup=False)
        console.print(f"  → {decision.then}", markup=False)
    console.print("[bold]What would help[/bold]")
    for number, each in enumerate(tried, start=1):
        advice = each.advice
        console.print(f"{number}. {advice.what}", markup=False)
        console.print(f"   {advice.why}\n   {advice.gain}", markup=False)
        if each.outcome is not None:
            console.print(f"   {_measured_line(each.outcome)}", markup=False)
        elif each.why_not is not None:
            console.print(f"   not measured: {each.why_not}", markup=False)
    if not tried:
        console.print("nothing that was tried")


def _measured_line(outcome: TrialOutcome) -> str:
    """Return the figures before and with the change."""
    gain, before, after = outcome.gain, outcome.before, outcome.after
    return (
        f"measured, {len(outcome.turns)} turns: {gain.value:.2f} × the tokens/s "
        f"({gain.low:.2f} to {gain.high:.2f}): TTFT {before.ttft_ms:,.1f} → {after.ttft_ms:,.1f} "
        f"ms, {before.output_tps:,.0f} → {after.output_tps:,.0f} tokens/s"
        f"{'' if outcome.helps else ', which is no help here'}"
    )
