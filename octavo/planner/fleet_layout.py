"""Lays out a simulated fleet as a plan of the same requests would."""

from __future__ import annotations

from dataclasses import replace

from octavo.cost.engine_profile import Limits
from octavo.cost.find_device import find_device
from octavo.cost.model_spec import ModelSpec
from octavo.planner.answer import Question, answer
from octavo.planner.traffic import Traffic
from octavo.sim.settings import FleetSettings
from octavo.sim.setup import TypicalLoad

# Requests that begin together are followed one by one: so many tell layouts apart.
_MOST_TOGETHER = 128


def with_planned_layout(
    spec: ModelSpec, fleet: FleetSettings, asked: TypicalLoad, limits: Limits
) -> FleetSettings:
    """Return the same fleet with the layout that a plan chooses for its devices.

    Raises:
        ConfigError: a setting of the fleet is not possible.
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
        dp_attention=parallel.dp_attention,
        replicas=found.replicas,
    )


def _question(
    spec: ModelSpec, fleet: FleetSettings, asked: TypicalLoad, limits: Limits
) -> Question:
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
