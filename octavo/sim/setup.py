"""Prepares a simulation, from settings to an object that can be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError
from octavo.base.renamed import RenamedAttribute
from octavo.cost.measured_steps import MeasuredSteps
from octavo.cost.model_spec import ModelSpec
from octavo.cost.open_spec import open_spec
from octavo.measure.slo import RequestSlo
from octavo.sim.fleet import FleetSpec
from octavo.sim.fleet_setup import simulated_fleet
from octavo.sim.prompts import PromptSpec, as_conversations, prompts_of_requests, prompts_of_trace
from octavo.sim.replica import ReplicaStepTimes
from octavo.sim.report import SimulationReport, report_on
from octavo.sim.settings import ClientSettings, FleetSettings
from octavo.sim.simulation import Progress, simulate
from octavo.sim.stage_timeline import StageTimeline
from octavo.workload.plan import LoadPlan, PromptMaker, create_plan, create_requests
from octavo.workload.settings import LoadSettings, Workload
from octavo.workload.traces import KINDS, read_trace

_TRACES = {"trace": "auto", "timed_trace": "bailian", **{kind: kind for kind in KINDS}}


class TypicalLoad(NamedTuple):
    """The mean of a load, by which a layout is chosen for it.

    Args:
        input_len, output_len: mean tokens of prompts, without what conversations repeat, and of
            answers.
        rate: requests a second; None where they are all sent at once, or each when another ends.
        concurrency: the most requests in flight; without a rate, how many there are.
    """

    input_len: int
    output_len: int
    rate: float | None
    concurrency: int | None


LayoutChooser = Callable[[FleetSettings, TypicalLoad], FleetSettings]
"""Returns the settings of a fleet with a layout for a load."""


@dataclass(frozen=True)
class Simulation:
    """All that a run needs; ``setting`` is the JSON by which a report describes the fleet."""

    model: str
    prompts: Sequence[PromptSpec]
    plan: LoadPlan
    fleet: FleetSpec
    load: LoadSettings
    setting: Mapping[str, Any]
    slo: RequestSlo | None = None
    seed: int = 0

    asks = RenamedAttribute("prompts")

    def run(
        self,
        watch: Callable[[ReplicaStepTimes], None] | None = None,
        progress: Progress | None = None,
    ) -> SimulationReport:
        """Simulate, and report on it; see ``simulate``."""
        stages = None if self.fleet.replica.stage_cost is None else StageTimeline()
        watch = _watched_by(watch, None if stages is None else stages.note)
        result = simulate(self.prompts, self.plan, self.fleet, watch=watch, progress=progress)
        return report_on(
            result,
            self.model,
            self.load,
            is_open_loop=self.plan.is_open_loop,
            setting=self.setting,
            slo=self.slo,
            seed=self.seed,
            stages=stages,
        )


Watch = Callable[[ReplicaStepTimes], None]


def _watched_by(one: Watch | None, other: Watch | None) -> Watch | None:
    if one is None or other is None:
        return one or other

    def both(times: ReplicaStepTimes) -> None:
        one(times)
        other(times)

    return both


def prepare(
    model: ModelSpec | str,
    fleet: FleetSettings,
    workload: Workload,
    load: LoadSettings,
    *,
    engine: Mapping[str, Any] | None = None,
    clients: ClientSettings | None = None,
    slo: RequestSlo | None = None,
    tokenizer: PromptMaker | None = None,
    measured: MeasuredSteps | None = None,
    lay_out: LayoutChooser | None = None,
) -> Simulation:
    """Return the simulation of a model that serves a load.

    Args:
        model: its shape, or what `octavo.cost.open_spec` finds that by: a name, a folder, a file.
        engine: settings of the engine that were asked for, of ``ENGINE_SETTINGS``.
        measured: step times on this hardware; None takes those of the roofline.
        slo: limits that requests should meet.
        tokenizer: of the model, for prompts that are text.
        lay_out: chooses a layout for the load, where the settings have none; without it, tensor
            parallelism takes all devices.

    Raises:
        ConfigError: settings contradict each other, or the model does not fit.
        WorkloadFileError: a file of requests is damaged, or has another format.
    """
    spec = open_spec(model) if isinstance(model, str) else model
    clients = clients or ClientSettings()
    prompts = prompts_of_workload(workload, clients, tokenizer or VocabularySize(spec.vocab_size))
    load = clients.load(load)
    first_turns = [prompt for prompt in prompts if prompt.follows is None]
    plan = create_plan(load, first_turns, workload.seed)
    if lay_out is not None and not fleet.has_layout:
        fleet = lay_out(fleet, typical_load(prompts, plan))
    servers, setting = simulated_fleet(spec, fleet, engine or {}, measured)
    return Simulation(spec.name, prompts, plan, servers, load, setting, slo, workload.seed)


# -- the load ------------------------------------------------------------------------------------


def prompts_of_workload(
    workload: Workload, clients: ClientSettings, tokenizer: PromptMaker
) -> list[PromptSpec]:
    """Return the prompts of a data set or a trace, as the clients send them."""
    kind = _TRACES.get(workload.dataset_name)
    if clients.trace is not None:
        prompts = _prompts_of_trace_file(clients.trace, "auto", workload)
    elif kind is None:
        prompts = prompts_of_requests(create_requests(workload, tokenizer))
    elif workload.dataset_path is None:
        raise ConfigError(f"the data set {workload.dataset_name!r} needs a --dataset-path")
    else:
        prompts = _prompts_of_trace_file(workload.dataset_path, kind, workload)
    if clients.turns > 1:
        prompts = as_conversations(prompts, clients.turns, clients.think_time)
    if clients.patience is not None:
        prompts = [replace(prompt, patience_s=clients.patience) for prompt in prompts]
    return prompts


def _prompts_of_trace_file(path: str, kind: str, workload: Workload) -> list[PromptSpec]:
    entries = read_trace(path, kind, limit=workload.num_prompts)
    if workload.output_len is not None:
        entries = [replace(entry, output_len=workload.output_len) for entry in entries]
    return prompts_of_trace(entries, speedup=workload.speedup, max_input_len=workload.max_input_len)


class VocabularySize:
    """Stands in for the tokenizer of a model that is not here: only the number of its tokens is
    known, so that prompts can be made of token ids, and no text can be encoded."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def is_special(self, token_id: int) -> bool:
        return False

    def encode(self, text: str) -> Sequence[int]:
        raise ConfigError(
            "only the model's tokenizer can count the tokens of a text: give a MODEL that is here, "
            "or a data set of token ids, or a trace"
        )


def typical_load(prompts: Sequence[PromptSpec], plan: LoadPlan) -> TypicalLoad:
    """Return the means of prompts that are sent by a plan."""
    input_len = max(1, round(sum(prompt.input_len for prompt in prompts) / len(prompts)))
    output_len = max(1, round(sum(prompt.output_len for prompt in prompts) / len(prompts)))
    seconds = max(plan.times, default=0.0) if plan.times is not None else 0.0
    if seconds:
        return TypicalLoad(input_len, output_len, len(prompts) / seconds, plan.max_concurrency)
    at_once = min(len(prompts), plan.max_concurrency or len(prompts))
    return TypicalLoad(input_len, output_len, None, at_once)
