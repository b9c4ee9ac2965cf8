"""``octavo simulate``: a server and its load in virtual time, before there is either."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from octavo.cli import terminal
from octavo.cli.bench.common import add_plot_flag, save_plots
from octavo.cli.calibrate import steps_here
from octavo.cli.engine_flags import (
    add_engine_flags,
    add_flags,
    add_model_argument,
    engine_kwargs,
    given_settings,
)
from octavo.cli.flags import add_json_flag, add_value
from octavo.cli.parser import rarely
from octavo.sim.settings import ENGINE_SETTINGS, ClientSettings, FleetSettings
from octavo.workload.settings import LoadSettings, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.cost.measured_steps import MeasuredSteps
    from octavo.sim.report import SimulationReport
    from octavo.sim.setup import Simulation
    from octavo.sim.timeline import Timeline

EXAMPLES = """\
examples:
  octavo simulate llama-3.1-8b --hardware h100-sxm --request-rate 8 --num-prompts 500 \\
    --input-len 1000 --output-len 200
  octavo simulate llama-3.1-70b --hardware h100-sxm:8 --replicas 2 --router prefix_aware \\
    --trace conversation_trace.jsonl --num-prompts 1000 --out day
  octavo simulate qwen3-32b --hardware a100-sxm-80gb:4 --profile vllm --max-concurrency 64
  octavo simulate llama-3.1-8b --hardware l40s:3 --replicas 3 --fail 1@30+20 --request-rate 20 \\
    --plot failure.png

The engine's own scheduler decides, block manager and prefix cache included; only time and tokens
are made up. --out DIR has result.json, series.csv, and timeline.json for https://ui.perfetto.dev.
"""


_PLOTTED_POINTS = 150  # more would be a scrawl

# Settings with which steps take what was measured, if they are as usual.
_AS_MEASURED = (
    "hardware",
    "profile",
    "quantization",
    "dtype",
    "tp",
    "pp",
    "ep",
    "dp",
    "dp_attention",
)


# Flags that are in the short help.
_OFTEN = (
    *("hardware", "tp", "quantization", "replicas", "trace"),
    *("num_prompts", "input_len", "output_len", "request_rate", "max_concurrency"),
    "max_num_seqs",
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_json_flag(parser)
    add_value(parser, "--out DIR", "write result, series and timeline there")
    add_plot_flag(parser)
    parser.add_argument(
        "--goodput",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME:MS",
        help="limits that a good request meets, in ms: ttft:200 tpot:50 e2el:5000",
    )
    add_flags(parser, "what serves", FleetSettings, often=_OFTEN)
    add_flags(parser, "who asks", ClientSettings, often=_OFTEN)
    add_flags(parser, "workload", Workload, often=_OFTEN)
    add_flags(parser, "load", LoadSettings, often=_OFTEN)
    add_engine_flags(parser, only=ENGINE_SETTINGS, often=_OFTEN)
    rarely(parser, "--plot", "--goodput")


def run(args: argparse.Namespace) -> int:
    from octavo.sim.timeline import Timeline

    simulation = _prepare(args)
    timeline = Timeline()
    is_watched = bool(args.out or args.plot)
    begin = time.perf_counter()
    with terminal.request_progress() as progress:
        report = simulation.run(timeline.note if is_watched else None, progress)
    _tell(args, report, time.perf_counter() - begin)
    for path in report.write(args.out, timeline) if args.out else ():
        terminal.say(f"written to {path}")
    save_plots(args, lambda: _figure(report, timeline))
    if report.report.metrics.completed == 0:
        reasons = dict.fromkeys(each.error for each in report.result.records if each.error)
        why = f": {next(iter(reasons))}" if reasons else ""
        terminal.say(f"octavo: error: no request was answered{why}")
        return 1
    return 0


def _prepare(args: argparse.Namespace) -> Simulation:
    from octavo.cost.open_spec import open_spec
    from octavo.measure.slo import RequestSlo
    from octavo.planner.fleet_layout import with_planned_layout
    from octavo.sim.fleet_setup import limits_of
    from octavo.sim.setup import prepare

    fleet = FleetSettings(**given_settings(args, FleetSettings))
    spec, limits = open_spec(args.model), limits_of(engine_kwargs(args))
    return prepare(
        spec,
        fleet,
        Workload(**given_settings(args, Workload)),
        LoadSettings(**given_settings(args, LoadSettings)),
        engine=engine_kwargs(args),
        clients=ClientSettings(**given_settings(args, ClientSettings)),
        slo=RequestSlo.from_texts(args.goodput),
        measured=_measured(args.model, fleet),
        lay_out=lambda fleet, asked: with_planned_layout(spec, fleet, asked, limits),
    )


def _measured(model: str, fleet: FleetSettings) -> MeasuredSteps | None:
    """Return the step times that `octavo calibrate` has measured; None unless this machine is
    simulated, with the model as it is."""
    usual = FleetSettings()
    if any(getattr(fleet, name) != getattr(usual, name) for name in _AS_MEASURED):
        return None
    return steps_here(model, fleet.kv_cache_dtype)


def _figure(report: SimulationReport, timeline: Timeline) -> Figure:
    from octavo.measure.metrics import latency_values
    from octavo.plots.simulation import run_over_time

    result, setting = report.result, report.setting
    values = latency_values(result.records)
    return run_over_time(
        timeline.series(result.makespan_s, max_points=_PLOTTED_POINTS),
        {name.upper(): [each * 1e3 for each in values[name]] for name in ("ttft", "tpot")},
        title=f"{report.summary.model_id} on {setting['devices']} × {setting['hardware']}, "
        f"simulated: {report.report.metrics.completed:,} requests",
        bounds_ms=report.report.limits_ms,
    )


def _tell(args: argparse.Namespace, report: SimulationReport, wall_s: float) -> None:
    if args.json:
        terminal.print_json({**report.as_json(), "wall_s": wall_s})
        return
    print(report.as_text())
    setting, result = report.setting, report.result
    layout = f" ({setting['layout']})" if setting["layout"] else ""
    print(
        f"simulated: {setting['devices']} x {setting['hardware']}{layout}, "
        f"{setting['kv_blocks']:,} KV blocks of {setting['block_size']} for each of "
        f"{len(result.replicas)} replicas; {result.makespan_s:,.1f} s in {wall_s:.1f} s"
    )
