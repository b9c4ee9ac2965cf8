"""Prepares a simulation, from settings to an object that can be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.base.renamed import RenamedAttribute
from octavo.cost.measured_steps import MeasuredSteps
from octavo.cost.model_spec import ModelSpec
from octavo.cost.open_spec import open_spec
from octavo.measure.slo import RequestSlo
from octavo.sim.fleet import FleetSpec
from octavo.sim.fleet_setup import simulated_fleet
from octavo.sim.load_setup import TypicalLoad, VocabularySize, prompts_of_workload, typical_load
from octavo.sim.prompts import PromptSpec
from octavo.sim.replica import ReplicaStepTimes
from octavo.sim.report import SimulationReport, report_on
from octavo.sim.settings import ClientSettings, FleetSettings
from octavo.sim.simulation import Progress, simulate
from octavo.workload.plan import LoadPlan, PromptMaker, create_plan
from octavo.workload.settings import LoadSettings, Workload

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
        result = simulate(self.prompts, self.plan, self.fleet, watch=watch, progress=progress)
        return report_on(
            result,
            self.model,
            self.load,
            is_open_loop=self.plan.is_open_loop,
            setting=self.setting,
            slo=self.slo,
            seed=self.seed,
        )


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
    servers = simulated_fleet(spec, fleet, engine or {}, measured)
    return Simulation(
        spec.name, prompts, plan, servers.spec, load, servers.setting, slo, workload.seed
    )
