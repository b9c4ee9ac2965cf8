"""The flags of ``octavo tune``, and what they ask."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.base.errors import ConfigError
from octavo.cli import UsageError
from octavo.cli.bench import common
from octavo.cli.engine_flags import add_flags, engine_kwargs, given_settings
from octavo.cli.flags import add_number, add_switch, add_value, from_flags, probability
from octavo.cli.parser import rarely
from octavo.planner.slo import Slo, parse_slo
from octavo.sim.settings import ENGINE_SETTINGS, ClientSettings, FleetSettings
from octavo.tuning.config_text import check_name
from octavo.workload.settings import LoadSettings, Workload

EXAMPLES = """\
With --request-rate, or a --trace that says when requests come, the settings are looked for that
answer most of them within the limits of --slo, and then those that use least of the limits.
Without, those that bear the highest rate. A setting that is given as a flag stays as it is; the
others of these are searched: max_num_seqs, max_num_batched_tokens, itl_target_ms and
enable_chunked_prefill, and, one of them at a time, kv_cache_dtype, threads and the files of --also.
The defaults are among what is tried, and stay where nothing is better.

What steps take is measured on this machine, in a minute for the engine as it is and a quarter of
one for each other KV type, number of threads and file, and kept below $OCTAVO_HOME for the next
time. With --no-measure, nothing is run: what was measured before counts, for the engine as it is;
where that is nothing, or with another --hardware, the roofline says what steps take, and threads
are left alone.

How often draft tokens are accepted depends on the prompts. Speculative decoding is searched if
--acceptance says how often; live engines then accept as often. Where prompts are text (sharegpt,
jsonl), the defaults and the best settings are run live with `--spec-method auto`, too. Else it is
left alone.

Requests are sent to live engines in this process: HTTP and clients come on top. Exit status: 0 the
limits hold, 2 they do not with any settings, and those that come nearest were written.

examples:
  octavo tune --slo ttft_p99=500,tpot_p99=50 --input-len 128 --output-len 64
  octavo tune smollm2-135m --slo ttft=300,tpot=40 --request-rate 4 --input-len 256 --plot tuned.svg
  octavo tune ./model.Q8_0.gguf --also ./model.Q4_K_M.gguf --slo tpot_p50=20 --trace day.jsonl
  octavo tune llama-3.1-8b --hardware h100-sxm --slo ttft=500,tpot=50 --input-len 1000
  octavo serve --config octavo-tuned.yaml
"""

_SIMULATED = {*ENGINE_SETTINGS, "kv_cache_dtype", "quantization"}
_LOAD = ("request_rate", "burstiness")
_REQUESTS = 200
# Flags of workloads and loads that are in the short help.
_OFTEN = ("dataset_path", "input_len", "output_len", "request_rate")


@dataclass(frozen=True, slots=True)
class Question:
    """The load, the limits and the settings of a search.

    Args:
        held: settings of the engine that stay as they are.
        is_measured: engines of this machine are timed, and the best of them run.
        live: how many of the best; 0 is none.
    """

    model: str
    slo: Slo
    hardware: str
    held: Mapping[str, Any]
    workload: Workload
    load: LoadSettings
    also: tuple[str, ...]
    acceptance: tuple[float, ...] | None
    num_candidates: int
    is_measured: bool
    live: int
    live_seconds: float
    turns: int
    out: str

    @property
    def is_here(self) -> bool:
        return self.hardware == FleetSettings().hardware

    @property
    def simulated_settings(self) -> Mapping[str, Any]:
        """Return the settings that are held and that a simulation knows; the weights of a model
        that is here stay as they are."""
        known = _SIMULATED - {"quantization"} if self.is_here else _SIMULATED
        return {name: value for name, value in self.held.items() if name in known}

    @property
    def may_speculate(self) -> bool:
        """True if no flag sets speculative decoding."""
        return not any(name.startswith("spec") for name in self.held)


def configure(parser: argparse.ArgumentParser) -> None:
    add_value(
        parser,
        "--slo LIMITS",
        "in milliseconds: ttft_p99=500,tpot_p99=50,e2e=10s@p95, or a preset such as "
        "mlperf:llama-3.1-8b; where no percentile is said, it is the 99th",
        required=True,
    )
    _add_search_flags(parser)
    _add_live_flags(parser)
    add_value(
        parser,
        "--out FILE",
        "config for `octavo serve --config`, as .yaml or .toml (default: %(default)s)",
        default="octavo-tuned.yaml",
    )
    add_number(parser, "--num-prompts", "requests, or how many of a trace at most", _REQUESTS)
    add_flags(parser, "who asks", ClientSettings, only={"trace"})
    add_flags(parser, "workload", Workload, skip={"num_prompts"}, often=_OFTEN)
    add_flags(parser, "load", LoadSettings, only=_LOAD, often=_OFTEN)
    add_flags(parser, "what serves", FleetSettings, only={"hardware"})
    common.add_benchmark_arguments(parser, skip={"seed"})
    rarely(parser, "--candidates", "--acceptance", "--live", "--live-seconds", "--turns", "--plot")
    rarely(parser, "--output", "--json", "--device", "--trace", "--hardware", "--also")


def _add_search_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    add_number(
        *(group, "--candidates"), "settings to begin with: each change alone, and random ones", 48
    )
    group.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="FILE",
        help="another file of the same model, such as a smaller one; may be given several times",
    )
    add_value(
        group,
        "--acceptance R,R,…",
        "how often draft tokens are accepted, by position, such as 0.6,0.4",
        _rates,
    )
    add_switch(group, "--no-measure", "run nothing on this machine")


def _add_live_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("live runs")
    add_number(
        *(group, "--live"), "how many of the best to run live, beside the defaults", 3, least=0
    )
    add_value(
        group,
        "--live-seconds S",
        "for how long each run is sent requests (default: %(default)g)",
        float,
        default=8.0,
    )
    add_number(group, "--turns", "live runs of each", 2)


def question_of(args: argparse.Namespace) -> Question:
    """UsageError: a value is wrong, or flags contradict each other."""
    try:
        slo = parse_slo(args.slo)
        check_name(args.out)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    if not args.live_seconds > 0:
        raise UsageError(f"--live-seconds must be above 0, not {args.live_seconds:g}")
    hardware = FleetSettings(**given_settings(args, FleetSettings)).hardware
    is_here = hardware == FleetSettings().hardware
    held = engine_kwargs(args)
    if not is_here:
        _check_elsewhere(held)
    is_measured = is_here and not args.no_measure
    return from_flags(
        Question,
        args,
        slo=slo,
        hardware=hardware,
        held=held,
        workload=_workload(args),
        load=LoadSettings(**given_settings(args, LoadSettings)),
        also=tuple(args.also),
        acceptance=args.acceptance,
        num_candidates=args.candidates,
        is_measured=is_measured,
        live=args.live if is_measured else 0,
    )


def _workload(args: argparse.Namespace) -> Workload:
    workload = Workload(**{**given_settings(args, Workload), "num_prompts": args.num_prompts})
    trace = given_settings(args, ClientSettings).get("trace")
    if trace is None:
        return workload
    if workload.dataset_path is not None:
        raise UsageError("--trace and --dataset-path are two loads: leave one out")
    return replace(workload, dataset_name="trace", dataset_path=trace)


def _check_elsewhere(held: Mapping[str, Any]) -> None:
    strange = sorted(held.keys() - _SIMULATED)
    if strange:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise UsageError(f"{flags}: a simulation of other --hardware does not know of that")


def _rates(text: str) -> tuple[float, ...]:
    return tuple(map(probability, text.split(",")))
