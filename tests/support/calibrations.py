"""Calibrations that nobody has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.calibration.store import CalibrationProfile, keep, model_and_processor
from octavo.cost.measured_steps import MeasuredSteps, Spread
from octavo.system import machine

STEPS = MeasuredSteps(
    {"step": 1e-4, "pass": 1e-3, "rows_from_1": 1e-5, "decode_key": 1e-7, "decode_score": 5e-8},
    {"decode": Spread(0.9, 1.1), "prompt": Spread(0.8, 1.2)},
    most_rows=512,
    most_seqs=64,
    most_keys=7000,
    drift=0.05,
)


def keep_calibration(model: Path, **about: Any) -> None:
    """Of a model's steps, as `octavo calibrate` keeps them; ``about``: how it was run, where that
    is not as usual."""
    usual = {
        "device": "cpu",
        "kv_dtype": "bfloat16",
        "threads": machine.cpu().usable_cores,
        "activations": "auto",
    }
    known = {**model_and_processor(model), **usual, **about}
    keep(CalibrationProfile(known, {}, STEPS, "2026-01-01T00:00:00+00:00"))
