"""A load on simulated engines with some settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.cost.measured_steps import MeasuredSteps
from octavo.cost.model_spec import ModelSpec
from octavo.measure.request_record import RequestRecord
from octavo.sim.fleet import FleetSpec
from octavo.sim.prompts import PromptSpec
from octavo.sim.settings import ENGINE_SETTINGS, FleetSettings
from octavo.sim.setup import Simulation, prepare
from octavo.sim.simulation import simulate
from octavo.tuning.objective import LoadRunner
from octavo.tuning.space import SPECULATION, CandidateSettings
from octavo.workload.plan import LoadPlan, PromptMaker
from octavo.workload.settings import LoadSettings, Workload

# A workload of which only the engine is used.
_LEAST_WORKLOAD = Workload(num_prompts=1, input_len=1, output_len=1)


class SimulatedEngines:
    """Simulated engines on some hardware, by candidates.

    Args:
        specs: the shape of each model by name; ``model`` is that of candidates that name none.
        held: settings of the engine that all candidates have.
        steps: measured step times, by the part of a candidate that they depend on; None takes
            those of the roofline.
        acceptance: rates at which draft tokens are accepted, by position. Without it there is
            no speculative decoding, even for candidates that ask for it.
    """

    def __init__(
        self,
        specs: Mapping[str, ModelSpec],
        model: str,
        hardware: str,
        held: Mapping[str, Any],
        steps: Mapping[CandidateSettings, MeasuredSteps | None],
        acceptance: Sequence[float] | None = None,
    ):
        self._specs = specs
        self._model = model
        self._hardware = hardware
        self._held = held
        self._steps = steps
        self._acceptance = acceptance
        self._fleets: dict[CandidateSettings, FleetSpec] = {}

    @property
    def can_speculate(self) -> bool:
        return self._acceptance is not None

    def simulation(
        self,
        candidate: CandidateSettings,
        workload: Workload,
        load: LoadSettings,
        tokenizer: PromptMaker | None = None,
    ) -> Simulation:
        """Return a load on one engine with these settings. ConfigError: they contradict
        each other."""
        settings = {**self._held, **candidate.settings}
        if settings.pop(SPECULATION, None) is not None and self._acceptance is not None:
            settings["speculative_config"] = synthetic_drafts(self._acceptance)
        fleet = FleetSettings(
            hardware=self._hardware,
            kv_cache_dtype=settings.get("kv_cache_dtype"),
            quantization=settings.get("quantization"),
        )
        return prepare(
            self._specs[settings.get("model", self._model)],
            fleet,
            workload,
            load,
            engine={name: settings[name] for name in ENGINE_SETTINGS if name in settings},
            tokenizer=tokenizer,
            measured=self._steps[candidate.engine],
        )

    def fleet(self, candidate: CandidateSettings) -> FleetSpec:
        """Return the engine alone."""
        if candidate not in self._fleets:
            least = self.simulation(candidate, _LEAST_WORKLOAD, LoadSettings())
            self._fleets[candidate] = least.fleet
        return self._fleets[candidate]

    def run_of(self, candidate: CandidateSettings, prompts: Sequence[PromptSpec]) -> LoadRunner:
        """Return a function that has a candidate serve the first requests."""
        fleet = self.fleet(candidate)

        def run(times: Sequence[float]) -> Sequence[RequestRecord]:
            return simulate(prompts[: len(times)], LoadPlan(times), fleet).records

        return run


def synthetic_drafts(rates: Sequence[float]) -> dict[str, Any]:
    """Return a ``speculative_config`` with given acceptance rates, for any engine."""
    return {"synthetic_acceptance_rates": list(rates)}
