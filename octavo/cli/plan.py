"""``octavo plan``: whether a model fits on some hardware, how fast, for how many, at what cost."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.base.files import replace_file
from octavo.cli import UsageError, terminal
from octavo.cli.bench.common import add_plot_flag, save_plots
from octavo.cli.flags import add_json_flag, add_number, add_switch, add_value
from octavo.cli.parser import rarely
from octavo.cli.plan_flags import add_plan_flags, question_of
from octavo.tuning.config_text import check_name, config_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    from octavo.cost.prediction import Prediction
    from octavo.cost.step_cost import StepCost
    from octavo.planner.answer import Plan, Question
    from octavo.planner.cheapest import CheapestPlan
    from octavo.planner.confirmation import SimulatedLimit
    from octavo.planner.prefill_split import PrefillSplit

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
  octavo plan llama-3.1-8b --hardware l40s --save server.yaml
"""

INFEASIBLE = 2
_MOST_OFFERS = 8


def configure(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    group = parser.add_argument_group("search")
    add_switch(
        group,
        "--cheapest",
        "the least number of devices that does what is asked; of each of the hardware that "
        "is named, in any layout, with weights as they are, in fp8, and in int4",
    )
    add_number(group, "--most-devices", "with --cheapest: no more than so many (default: 64)")
    add_switch(
        parser,
        "--confirm",
        "have production's scheduler, simulated, say what it makes of the limits of --slo; "
        "--cheapest always does",
    )
    add_switch(
        parser,
        "--disaggregate",
        "simulate each number of replicas that could compute prompts for the others, and "
        "say which keeps furthest from the limits of --slo",
    )
    group = parser.add_argument_group("output")
    add_switch(group, "--memory", "what memory goes to")
    add_switch(group, "--roofline", "what steps go to, by operation")
    add_json_flag(group)
    add_plot_flag(parser)
    add_value(
        group,
        "--export FILE",
        "write what steps, memory and money of the plan depend on, and steps to check by: "
        "JSON, from which a page can compute the same",
    )
    add_value(
        group,
        "--save FILE",
        "write the settings that are recommended, each with its reason, for octavo serve "
        "--config FILE: YAML, or TOML",
    )
    rarely(
        parser,
        *("--most-devices", "--confirm", "--disaggregate", "--roofline", "--save", "--export"),
        "--plot",
    )


def run(args: argparse.Namespace) -> int:
    if args.most_devices is not None and not args.cheapest:
        raise UsageError("--most-devices says nothing without --cheapest")
    if args.confirm and args.slo is None:
        raise UsageError("--confirm needs --slo: it says whether limits hold")
    if args.save is not None:
        check_name(args.save)
    if args.disaggregate and args.slo is None:
        raise UsageError("--disaggregate needs --slo: splits are compared by its limits")
    if args.disaggregate and args.cheapest:
        raise UsageError("--disaggregate splits the replicas of a plan: leave out --cheapest")
    from octavo.planner.ranking import is_of_several

    if args.cheapest:
        return _run_search(args)
    return _run_plans(args, is_of_several(args.hardware))


def _run_plans(args: argparse.Namespace, is_ranking: bool) -> int:
    """Answer the question for one device, or for several: a table of them, and the best plan."""
    from octavo.planner.answer import answer
    from octavo.planner.ranking import ranked, ranked_json
    from octavo.planner.report import cost_json, plan_json

    question = question_of(args)
    if is_ranking:
        with terminal.spinner("planning for each device"):
            plans = ranked(question)
    else:
        plans = [answer(question)]
    plan = plans[0]
    confirmed = _confirmed(plan) if args.confirm else ()
    splits = _splits(plan) if args.disaggregate else ()
    if args.json:
        document = plan_json(plan)
        if args.disaggregate:
            document["splits"] = [each.as_json() for each in splits]
        if is_ranking:
            document["ranked"] = ranked_json(plans)
        if args.confirm:
            document["simulated"] = [each.as_json() for each in confirmed]
        if args.roofline and not is_ranking:
            document["roofline"] = {
                "prefill": cost_json(plan.prefill_cost),
                "decode": cost_json(plan.decode_cost),
            }
        terminal.print_json(document)
    else:
        if is_ranking:
            _print_ranking(terminal.console(), plans, question)
        _print_plan(terminal.console(), plan, args)
        _print_confirmed(terminal.console(), confirmed)
        _print_splits(terminal.console(), splits)
    _write_files(args, plan, splits[0].num_prefill if splits else 0)
    return 0 if plan.is_feasible and all(each.holds for each in confirmed) else INFEASIBLE


def _confirmed(plan: Plan) -> Sequence[SimulatedLimit]:
    """Simulate the limits of a plan; none if it serves nothing."""
    from octavo.planner.confirmation import confirm

    if plan.service is None:
        return ()
    with terminal.spinner("simulating"):
        return confirm(plan.verdict, plan.slo)


def _splits(plan: Plan) -> Sequence[PrefillSplit]:
    from octavo.planner.prefill_split import prefill_splits

    with terminal.spinner("simulating splits"):
        return prefill_splits(plan.verdict, plan.slo)


def _print_splits(console: Console, splits: Sequence[PrefillSplit]) -> None:
    """Print a line for each split, the best first."""
    if not splits:
        return
    console.print("replicas that compute prompts for the others, the best first:")
    for each in splits:
        limits = ", ".join(
            f"{found.limit.name} {found.seconds * 1e3:,.1f} of {found.limit.seconds * 1e3:,.0f} ms"
            for found in each.limits
        )
        busy = "".join(f"; {name} {about['busy']:.0%} busy" for name, about in each.roles.items())
        console.print(f"  --prefill-replicas {each.num_prefill}: {limits}{busy}", markup=False)


def _run_search(args: argparse.Namespace) -> int:
    from octavo.planner.cheapest import MOST_DEVICES, cheapest
    from octavo.planner.report import plan_json

    question = question_of(args)
    with terminal.spinner("looking for the cheapest"):
        solution = cheapest(question, args.most_devices or MOST_DEVICES)
    if args.json:
        terminal.print_json({**plan_json(solution.plan), **solution.as_json()})
    else:
        _print_search(terminal.console(), solution)
        _print_left_out(terminal.console(), question)
        _print_plan(terminal.console(), solution.plan, args)
    _write_files(args, solution.plan)
    return 0 if solution.search.offers else INFEASIBLE


def _write_files(args: argparse.Namespace, plan: Plan, num_prefill: int = 0) -> None:
    """Write what ``--plot``, ``--save`` and ``--export`` ask for. ConfigError if that cannot be."""

    def draw() -> Figure:
        from octavo.plots.planning import plan_figure

        return plan_figure(plan, title=_what(plan))

    save_plots(args, draw)
    if args.save is not None:
        _save(args.save, plan, num_prefill)
    if args.export is None:
        return
    from octavo.planner.formulas import formulas_json

    formulas = formulas_json(plan.deployment, plan.question.price)
    _write(args.export, json.dumps(formulas, allow_nan=False))


def _write(path: str, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    terminal.say(f"written to {path}")


def _save(path: str, plan: Plan, num_prefill: int) -> None:
    """Write the settings of a server that is as planned. ConfigError if there is none."""
    from octavo.planner.serve_settings import serve_settings, summary

    try:
        settings = serve_settings(plan, num_prefill)
    except ConfigError as error:
        if not plan.is_feasible:
            return terminal.say(f"{path} is not written: the plan is not feasible")
        raise ConfigError(f"--save {path}: {error}") from None
    values = {each.name: each.value for each in settings}
    reasons = {each.name: each.why for each in settings}
    _write(path, config_text(path, values, summary(plan), reasons))


# -- for people -----------------------------------------------------------------------------------


def _print_plan(console: Console, plan: Plan, args: argparse.Namespace) -> None:
    from octavo.planner.money import watts_text
    from octavo.planner.whole_experts import whole_experts

    console.print(_what(plan), markup=False)
    for warning in plan.warnings:
        console.print(f"note: {warning}", markup=False)
    binding = plan.verdict.binding
    if binding is None:
        sure = "" if plan.verdict.is_certain else ", though a limit lies inside of an interval"
        console.print(f"[green]feasible[/green]{sure}")
    else:
        console.print(f"[red]not feasible[/red]: {binding.name}")
        console.print(f"  {binding.why}", markup=False)
    console.print(_figures_table(plan))
    if plan.bill is not None and plan.bill.joules_per_output_token is not None:
        console.print(f"* at {watts_text(plan.deployment.device)}", markup=False)
    if args.memory:
        console.print(_memory_table(plan))
    if args.roofline:
        console.print(_roofline_table("prefill", plan.prefill_cost))
        console.print(_roofline_table("decode", plan.decode_cost))
    if (experts := whole_experts(plan.verdict)) is not None:
        console.print(f"a step, by its experts: {experts.text}", markup=False)
    for line in (*_nearest_lines(plan), *_advice_lines(plan)):
        console.print(line, markup=False)


def _what(plan: Plan) -> str:
    """``llama-3.1-8b in fp8 on 2 x H100 SXM (tp 2), as vllm runs it``."""
    deployment = plan.deployment
    layout = deployment.parallel.text(deployment.replicas)
    return (
        f"{deployment.spec.name} in {deployment.precision.name} on {deployment.num_devices} × "
        f"{deployment.device.name}{f' ({layout})' if layout else ''}, "
        f"as {deployment.profile.name} runs it"
    )


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table


def _figures_table(plan: Plan) -> Table:
    table = _table("", "predicted", "from", "to", "known by")
    traffic, service = plan.traffic, plan.service
    rows: list[tuple[str, Prediction]] = [
        (f"prefill of {traffic.input_len:,} tokens, ms", plan.prefill * 1e3),
        (f"decode step of {plan.streams:,}, ms", plan.decode_step * 1e3),
    ]
    if service is not None:
        mean = service.latency()
        rows += [
            ("time to first token, ms", mean.ttft * 1e3),
            ("time per output token, ms", mean.tpot * 1e3),
            ("whole answer, ms", mean.e2e * 1e3),
            ("output, tokens/s", service.requests_per_second * traffic.output_len),
        ]
        rows += [(f"{each.limit.name}, ms", each.predicted * 1e3) for each in plan.verdict.kept]
    if plan.bill is not None:
        rows += [
            ("a million output tokens, USD", plan.bill.per_million_output_tokens),
            ("a day, USD", plan.bill.per_day),
        ]
        if plan.bill.joules_per_output_token is not None:
            rows.append(("energy of an output token, J *", plan.bill.joules_per_output_token))
    for name, figure in rows:
        ends = (figure.value, figure.low, figure.high)
        table.add_row(name, *map(_number, ends), figure.source)
    fitting = plan.deployment.max_concurrency(traffic.total_len)
    table.add_row(f"requests of {traffic.total_len:,} tokens that fit", f"{fitting:,}")
    return table


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    if math.isinf(value):
        return "no end"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _memory_table(plan: Plan) -> Table:
    memory, utilization = plan.deployment.memory, plan.deployment.settled.utilization
    table = _table("memory of one device", "")
    for name, count in (
        ("reported", memory.total_bytes),
        (f"that may be used ({utilization:.0%})", memory.usable_bytes),
        ("weights", memory.weights_bytes),
        ("activations of the largest step", round(memory.activations.value)),
        ("outside of what is allocated", memory.non_torch_bytes),
        ("recorded graphs", memory.graphs_bytes),
        ("of these and others kept back", memory.kept_back_bytes),
        ("left for keys and values", memory.kv_bytes),
    ):
        table.add_row(name, terminal.format_bytes(count) if count >= 0 else "nothing")
    table.add_row("KV of a token", terminal.format_bytes(memory.kv_bytes_per_token))
    table.add_row("tokens that fit", f"{memory.kv_tokens:,}")
    return table


def _roofline_table(phase: str, cost: StepCost) -> Table:
    table = _table(phase, "ms", "MB", "GFLOP", "FLOP/B", "ridge", "bound")
    for op in cost.ops:
        table.add_row(
            op.name,
            f"{op.seconds * 1e3:.3f}",
            f"{op.bytes / 1e6:,.1f}",
            f"{op.flops / 1e9:,.1f}",
            f"{op.intensity:,.1f}",
            f"{op.ridge:,.0f}",
            op.bound,
        )
    table.add_row("communication", f"{cost.comm.value * 1e3:.3f}")
    table.add_row("once a step", f"{cost.overhead.value * 1e3:.3f}")
    table.add_row("in all", f"{cost.total.value * 1e3:.3f}", *[""] * 4, cost.bound)
    return table


def _nearest_lines(plan: Plan) -> Iterator[str]:
    nearest = plan.feasible_alternatives
    if nearest is None:
        return
    if nearest.num_devices is not None:
        yield f"nearest: {nearest.num_devices} devices of this kind would do"
    else:
        precision = plan.deployment.precision
        yield (
            f"nearest: no number of such devices would do with weights in {precision.name} and "
            f"keys and values in {precision.kv.name}"
        )
    if nearest.rate is not None:
        yield f"  {nearest.rate:.3g} requests a second on these"
    yield f"  {nearest.concurrency:,} requests at once"
    if nearest.output_len is not None:
        yield f"  answers of {nearest.output_len:,} tokens"
    for name, seconds in nearest.limits.items():
        yield f"  {name} = {seconds * 1e3:,.0f} ms"


def _advice_lines(plan: Plan) -> Iterator[str]:
    for number, advice in enumerate(plan.advice, start=1):
        yield f"{number}. {advice.what}"
        yield f"   {advice.why}"
        yield f"   {advice.gain}"


def _print_ranking(console: Console, plans: Sequence[Plan], question: Question) -> None:
    from octavo.planner.ranking import dollars_of

    table = _table(
        "device", "devices", "feasible", "USD/M tokens", "TTFT ms", "TPOT ms", "tokens/s"
    )
    for plan in plans:
        deployment, service, dollars = plan.deployment, plan.service, dollars_of(plan)
        binding = plan.verdict.binding
        row = [
            deployment.device.name,
            str(deployment.num_devices),
            "yes" if binding is None else f"no: {binding.name}",
            "" if dollars is None else _number(dollars),
        ]
        if service is not None:
            mean = service.latency()
            tokens = service.requests_per_second.value * plan.traffic.output_len
            row += [_number(mean.ttft.value * 1e3), _number(mean.tpot.value * 1e3), _number(tokens)]
        table.add_row(*row)
    console.print(table)
    _print_left_out(console, question)


def _print_left_out(console: Console, question: Question) -> None:
    from octavo.planner.cheapest import left_out

    if names := left_out(question):
        console.print(
            f"left out, as {question.engine} does not run there: {', '.join(names)} "
            "(--profile names another engine)",
            markup=False,
        )


def _print_search(console: Console, solution: CheapestPlan) -> None:
    table = _table("offer", "layout", "devices", "USD/h", "TTFT ms", "TPOT ms")
    for offer in solution.search.offers[:_MOST_OFFERS]:
        deployment, service = offer.deployment, offer.verdict.service
        assert service is not None
        latency = service.latency()
        table.add_row(
            f"{deployment.device.name}, {deployment.precision.name}",
            deployment.parallel.text(deployment.replicas),
            str(deployment.num_devices),
            "" if offer.dollars_per_hour is None else f"{offer.dollars_per_hour.value:,.2f}",
            f"{latency.ttft.value * 1e3:,.0f}",
            f"{latency.tpot.value * 1e3:,.1f}",
        )
    if solution.search.offers:
        console.print(table)
    else:
        console.print("no number of these does; what comes nearest:")
    _print_confirmed(console, solution.confirmed)


def _print_confirmed(console: Console, confirmed: Sequence[SimulatedLimit]) -> None:
    for each in confirmed:
        verdict = "holds" if each.holds else "does not hold"
        console.print(
            f"simulated: {each.limit.name} is {each.seconds * 1e3:,.1f} ms, which {verdict}",
            markup=False,
        )
