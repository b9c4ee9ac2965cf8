"""Measures how fast the machine is now, relative to its calibration.

The speed of a shared machine changes within minutes, by a tenth or two: by the clock of its
processors, and by other work on it. A second of the same kinds of steps shows by how much.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.calibration.calibration_run import size_of, steps_of
from octavo.calibration.fit import TimedStep, usual
from octavo.calibration.loads import CalibrationLoad, fits
from octavo.cost.measured_steps import MeasuredSteps, regime_of

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession

_DECODE, _PROMPTS = "decode", ("prompt", "mixed")


def slowness_now(session: OfflineSession, steps: MeasuredSteps, seed: int) -> dict[str, float]:
    """Return the time of steps now over their calibrated time, by regime. Every call has a ``seed``
    of its own: prompts of an earlier call would be found in the cache."""
    size = size_of(session)
    timed = [
        step
        for load in _LOADS
        if fits(load, size)
        for step in steps_of(session, load, f"now {seed}")
    ]
    prompts = _quotient(steps, [each for each in timed if _regime(each) in _PROMPTS])
    decode = _quotient(steps, [each for each in timed if _regime(each) == _DECODE])
    return {_DECODE: decode, **dict.fromkeys(_PROMPTS, prompts)}


def between(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of two slownesses."""
    return {name: (value + other[name]) / 2 for name, value in one.items()}


def _requests(count: int, seed: int) -> tuple[tuple[int, int], ...]:
    rng = random.Random(seed)
    return tuple((rng.randint(64, 192), rng.randint(12, 36)) for _ in range(count))


# Steps like those of a server: a few requests that decode, and prompts that join them.
_LOADS = (
    CalibrationLoad("a lone stream", ((16, 26),)),
    CalibrationLoad("4 short streams", ((16, 16),) * 4),
    *(CalibrationLoad(f"a prompt of {length}", ((length, 1),)) for length in (96, 192)),
    CalibrationLoad("some requests", _requests(8, 0)),
)


def _regime(step: TimedStep) -> str:
    return regime_of(step.passes[0])


def _quotient(steps: MeasuredSteps, timed: Sequence[TimedStep]) -> float:
    """Measured over predicted time; 1 where every step was disturbed."""
    said = [steps.step_seconds(each.passes) for each in timed]
    kept = [
        (each.seconds, value)
        for each, value in zip(timed, said, strict=True)
        if usual(each.seconds, value)
    ]
    return sum(each for each, _ in kept) / sum(value for _, value in kept) if kept else 1.0
