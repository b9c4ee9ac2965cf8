"""``octavo calibrate``: what steps of a model take on this machine, for plans and simulations."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.engine_flags import DEFAULT_MODEL, engine_kwargs
from octavo.cli.flags import add_switch, add_value

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.bench.offline.session import OfflineSession
    from octavo.calibration.store import CalibrationProfile
    from octavo.cost.measured_steps import MeasuredSteps
    from octavo.cost.networks import Network

EXAMPLES = """\
A minute of the engine's own steps is timed: prompts of all lengths, few and many requests, short
and long ones, alone and mixed. What comes out is kept below $OCTAVO_HOME, for this model, this
processor and these settings; `octavo plan`, `advise` and `simulate` with --hardware auto take it
from there, and `octavo validate` says how far it can be trusted. Nothing else should run meanwhile.

With --link, the network between machines is measured instead, as stages of a pipeline use it: over
TLS, one way. One machine listens and shows a ticket, which is secret and lets one other in, once;
the other one takes the ticket from standard input, or from $OCTAVO_LINK_TICKET, and measures. Plans
and simulations take it from there: --hardware auto:2@10.0.0.5 is two machines like this one, with
that network between them.

examples:
  octavo calibrate
  octavo calibrate smollm2-135m --quick
  octavo calibrate ./model.gguf --threads 4 --kv-cache-dtype int8 --json
  octavo calibrate --link loopback
  octavo calibrate --link listen --link-address 10.0.0.5:7000     # on one machine
  octavo calibrate --link connect                                 # on the other one
"""

# What is shown of a calibration: steps by (requests, tokens of each, tokens before them).
_SHOWN = (
    ("one request decodes", 1, 1, 128),
    ("8 requests decode", 8, 1, 128),
    ("32 requests decode", 32, 1, 128),
    ("8 requests decode, after 1,024 tokens", 8, 1, 1024),
    ("a prompt of 128", 1, 128, 0),
    ("a prompt of 512", 1, 512, 0),
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_switch(parser, "--quick", "a quarter of the time, and less certain")
    group = parser.add_argument_group("link to another machine")
    add_value(
        group,
        "--link WHAT",
        "measure a link, and no model: loopback is this machine alone, listen waits for another "
        "one, connect measures the way to the one whose ticket it is given",
        choices=tuple(_LINKS),
    )
    add_value(
        group,
        "--link-address HOST[:PORT]",
        "of --link listen: the address of this machine to listen on (default: loopback, which no "
        "other machine reaches)",
    )
    common.add_benchmark_arguments(parser, plot=False)
    parser.set_defaults(model=None)  # so that one that is given is known


def run(args: argparse.Namespace) -> int:
    if args.link is not None:
        return _run_link(args)
    if args.link_address is not None:
        raise UsageError("--link-address is of --link listen, which was not given")
    args.model = args.model or DEFAULT_MODEL
    return _run_steps(args)


def _run_link(args: argparse.Namespace) -> int:
    given = [name for name, value in (("MODEL", args.model), ("--quick", args.quick)) if value]
    given += ["--" + name.replace("_", "-") for name in engine_kwargs(args)]
    if given:
        raise UsageError(f"--link measures no model: leave out {', '.join(given)}")
    if args.link_address is not None and args.link != "listen":
        raise UsageError(f"--link-address is of --link listen, not of --link {args.link}")
    warn_if_busy()
    return _LINKS[args.link](args)


def _listen(args: argparse.Namespace) -> int:
    from octavo.calibration.link_run import serve_one
    from octavo.links.listener import LOOPBACK
    from octavo.links.ticket import Ticket, parse_address

    address = LOOPBACK if args.link_address is None else parse_address(args.link_address)

    def show(ticket: Ticket) -> None:
        terminal.say("on the other machine: octavo calibrate --link connect, with this ticket:")
        print(ticket.secret_text(), flush=True)

    peer = serve_one(address, show)
    terminal.say(f"{peer} has measured the link")
    return 0


def _connect(args: argparse.Namespace) -> int:
    from octavo.calibration.link_run import measure_to
    from octavo.links.ticket import receive_ticket

    return _report_link(args, measure_to(receive_ticket()))


def _loopback(args: argparse.Namespace) -> int:
    from octavo.calibration.link_run import measure_loopback

    return _report_link(args, measure_loopback())


_LINKS = {"loopback": _loopback, "listen": _listen, "connect": _connect}


def _report_link(args: argparse.Namespace, link: Network) -> int:
    from octavo.calibration.link_run import keep

    path = keep(link)

    def show(console: Console) -> None:
        rows = [
            ("a message of a step, median", f"{link.latency_s * 1e6:,.0f}", "us"),
            ("the same, 99 of 100", f"{link.latency_p99_s * 1e6:,.0f}", "us"),
            ("long frames", f"{link.bandwidth / 1e9:,.3f}", "GB/s"),
        ]
        common.print_figures(console, f"the link to {link.name}, one way", ("", "", ""), rows)
        console.print(f"kept in {path}", style="dim", highlight=False)

    common.report(args, {"path": str(path), **link.as_json()}, show)
    return 0


def _run_steps(args: argparse.Namespace) -> int:
    from octavo.bench.record import Recorder
    from octavo.calibration.store import keep

    with (
        common.open_session(common.engine_args(args)) as session,
        Recorder.of(session, common.asked_for(args)) as recorder,
    ):
        profile = measured(session, quick=args.quick)
    path = keep(profile)
    document = {"path": str(path), **profile.as_json(), "run": recorder.as_json()}
    common.report(args, document, lambda console: print_profile(profile, str(path), console))
    return 0


def steps_here(model: str, kv_cache_dtype: str | None) -> MeasuredSteps | None:
    """Return the measured step times of a model on this machine, with all its threads and default
    settings; None if they were not measured, or if the model is not here.

    Raises:
        ConfigError: the type of the KV cache is unknown.
    """
    from octavo.calibration.known_profiles import profile_here
    from octavo.cost.kv_type import kv_type
    from octavo.system import machine

    profile = profile_here(
        model,
        device="cpu",  # of GPUs, nothing says which one was there
        threads=machine.cpu().usable_cores,
        kv_dtype=kv_type(kv_cache_dtype or "auto").name,
        activations="auto",
    )
    return None if profile is None else profile.steps


def known_or_measured(session: OfflineSession, *, quick: bool = False) -> CalibrationProfile:
    """Return the profile of a session's engine; if there is none, measure it first, and keep it."""
    from octavo.calibration.calibration_run import about
    from octavo.calibration.store import find, keep

    profile = find(about(session))
    if profile is None:
        length = "15 seconds" if quick else "a minute"
        terminal.say(f"there is no calibration of this engine yet: {length} for that")
        profile = measured(session, quick=quick)
        keep(profile)
    return profile


def warn_if_busy() -> None:
    """Says so on stderr; what is measured now is likely wrong."""
    from octavo.cost.this_machine import is_busy, load_average
    from octavo.system import machine

    load, cores = load_average(), machine.cpu().usable_cores
    if load is not None and is_busy(load, cores):
        terminal.say(
            f"octavo: warning: others use this machine (a load of {load:.1f} on {cores} cores over "
            "the last minute): what is measured now is likely too slow"
        )


def measured(session: OfflineSession, *, quick: bool) -> CalibrationProfile:
    """Calibrate the engine of a session, with a progress bar."""
    from datetime import UTC, datetime

    from octavo.calibration.calibration_run import calibrate, profile_of

    warn_if_busy()
    with terminal.progress_over("timing steps", 100) as advance:
        shown = 0

        def progress(what: str, share: float) -> None:
            nonlocal shown
            while shown < 100 * share:
                shown += 1
                advance()

        steps = calibrate(session, quick=quick, progress=progress)
    return profile_of(session, steps, datetime.now(UTC).isoformat(timespec="seconds"))


def print_profile(profile: CalibrationProfile, path: str, console: Console) -> None:
    from octavo.cost.step_cost import StepFeatures
    from octavo.cost.work import Span, passes

    rows = []
    for what, num_seqs, num_tokens, start in _SHOWN:
        spans = [Span(start, num_tokens)] * num_seqs
        features = StepFeatures.of(next(passes(spans)))
        predicted = profile.steps.prediction(features) * 1e3
        once = 1e3 * (profile.steps.step_s + num_seqs * profile.steps.sequence_s)
        figures = (predicted.value + once, predicted.low + once, predicted.high + once)
        rows.append((what, "ms", *(f"{each:,.2f}" for each in figures), predicted.source))
    title = f"{profile.about['model']} on {profile.about['processor']}"
    header = ("what a step takes", "", "about", "from", "to", "")
    common.print_figures(console, title, header, rows)
    console.print(f"kept in {path}", style="dim", highlight=False)
