"""``octavo validate``: the same requests simulated and live, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.cli import terminal
from octavo.cli.bench import common
from octavo.cli.flags import add_number, add_value, whole_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from octavo.bench.offline.session import OfflineSession
    from octavo.calibration.validate import ValidationCase, ValidationRow
    from octavo.cost.hardware import Device
    from octavo.cost.measured_steps import MeasuredSteps

EXAMPLES = """\
Requests are sent to the engine in this process, in real time, and to a simulation of it whose steps
take what `octavo calibrate` has measured; without a calibration of this model, processor and these
settings, there is one first. Each trace is drawn anew for each repeat. The interval of a figure is
what comes out if all steps take the least, or the most, that they may.

How fast a shared machine is changes within minutes. A second of other work before and after each
run says how fast it is just then, and that machine is simulated; errors "as calibrated" are those
of simulations that do not know it.

Nothing else should run meanwhile. No error that is smaller than what live runs of the same trace
differ by says anything.

examples:
  octavo validate
  octavo validate smollm2-135m --repeats 5 --json
  octavo validate ./model.gguf --trace trace.jsonl --num-prompts 100
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_value(
        parser,
        "--trace FILE",
        "requests and when they come, in any format that `octavo trace` reads (default: "
        "steady at 50 and at 85 %% of what the engine can do, bursts, and shared prefixes)",
    )
    add_value(parser, "--repeats N", "default: %(default)s", whole_number, default=3)
    add_number(parser, "--num-prompts", "requests of each run", 100)
    common.add_seed_flag(parser)
    common.add_benchmark_arguments(parser, skip={"seed"})


def run(args: argparse.Namespace) -> int:
    from octavo.bench.record import Recorder
    from octavo.calibration.validate import summary, validate
    from octavo.cli.calibrate import known_or_measured
    from octavo.cost.find_device import find_device

    with common.open_session(common.engine_args(args, seed=args.seed)) as session:
        profile = known_or_measured(session)
        device, steps = find_device("auto")[0], profile.steps
        validation_cases = _cases(args, session, device, steps)
        with (
            Recorder.of(session, common.asked_for(args)) as recorder,
            terminal.progress_over("running", len(validation_cases)) as advance,
        ):
            rows = validate(
                session, device, steps, validation_cases, lambda what, done, total: advance()
            )
    document = {
        "rows": [row.as_json() for row in rows],
        "summary": summary(rows),
        "calibration": {"about": dict(profile.about), "measured_at": profile.measured_at},
        "run": recorder.as_json(),
    }
    common.report(
        args,
        document,
        lambda console: print_result(rows, document, console),
        lambda: _figure(args.model, rows),
    )
    return 0


def _figure(model: str, rows: Sequence[ValidationRow]) -> Figure:
    from octavo.plots.validation import live_and_simulated

    return live_and_simulated(rows, title=f"{model}: simulated and live")


def _cases(
    args: argparse.Namespace, session: OfflineSession, device: Device, steps: MeasuredSteps
) -> Sequence[ValidationCase]:
    from octavo.calibration.validate import ValidationCase, validation_cases
    from octavo.workload.datasets import load_dataset

    if args.trace is None:
        return list(
            validation_cases(
                session,
                device,
                steps,
                repeats=args.repeats,
                num_requests=args.num_prompts,
                seed=args.seed,
            )
        )
    requests = load_dataset(
        "trace", args.trace, num=args.num_prompts, tokenizer=session.tokenizer, seed=args.seed
    )
    times = [request.arrival_s for request in requests]
    if not times or None in times:
        raise ConfigError(f"{args.trace} does not say when requests come")
    sent = [time or 0.0 for time in times]
    return [ValidationCase(args.trace, repeat, requests, sent) for repeat in range(args.repeats)]


def print_result(rows: Sequence[ValidationRow], document: dict[str, Any], console: Console) -> None:
    common.print_figures(
        console,
        "simulated and live",
        ("trace", "repeat", "figure", "live", "simulated", "error", "interval"),
        [
            (
                row.trace,
                str(row.repeat),
                row.metric,
                f"{row.live:,.1f}",
                f"{row.simulated:,.1f}",
                f"{row.error:+.1%}",
                f"{row.low:,.1f} to {row.high:,.1f}{'' if row.is_inside else ' !'}",
            )
            for row in rows
        ],
    )
    common.print_figures(
        console,
        "errors",
        ("figure", "mean", "largest", "inside the interval", "mean, as calibrated"),
        [
            (
                metric,
                f"{each['mean_abs_error']:.1%}",
                f"{each['max_abs_error']:.1%}",
                f"{each['inside_interval']:.0%}",
                f"{each['mean_abs_error_as_calibrated']:.1%}",
            )
            for metric, each in document["summary"].items()
        ],
    )
