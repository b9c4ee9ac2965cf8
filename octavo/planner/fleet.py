"""A fleet that is simulated, laid out as a plan of the same requests would be."""

from __future__ import annotations

from dataclasses import replace

from octavo.cost.engine_profile import Limits
from octavo.cost.find_device import find_device
from octavo.cost.model_spec import ModelSpec
from octavo.planner.answer import Question, answer
from octavo.planner.traffic import Traffic
from octavo.sim.settings import FleetSettings
from octavo.sim.setup import Typical

# Requests that are all there at once are followed one by one: so many tell layouts apart.
_MOST_TOGETHER = 128


def laid_out(
    spec: ModelSpec, fleet: FleetSettings, asked: Typical, limits: Limits
) -> FleetSettings:
    """The same fleet with the layout that a plan chooses for its devices.

    Raises:
        ConfigError: a setting of the fleet cannot be.
    """
    if find_device(fleet.hardware)[1] == 1:
        return fleet
    found = answer(_question(spec, fleet, asked, limits)).deployment
    parallel = found.parallel
    return replace(
        fleet,
        tp=parallel.tp,
        pp=parallel.pp,
        ep=parallel.ep,
        dp=parallel.dp,
        replicas=found.replicas,
    )


def _question(spec: ModelSpec, fleet: FleetSettings, asked: Typical, limits: Limits) -> Question:
    at_once = asked.concurrency
    if asked.rate is None:
        at_once = min(at_once or 1, _MOST_TOGETHER)
    return Question(
        model=spec,
        hardware=fleet.hardware,
        traffic=Traffic(asked.input_len, asked.output_len, asked.rate, at_once),
        dtype=fleet.dtype,
        quantization=fleet.quantization,
        kv_cache_dtype=fleet.kv_cache_dtype,
        engine=fleet.profile,
        limits=limits,
    )
