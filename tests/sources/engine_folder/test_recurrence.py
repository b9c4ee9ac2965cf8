"""Programs with recurrent layers as JSON, and back."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hybrid_models import RECURRENCES, make_hybrid

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.kernels.fused_ops import FusedRecurrence
from octavo.runtime.op_program import plan_step
from octavo.sources.engine_folder.model_config import config_json, read_config
from octavo.sources.engine_folder.program import Constants, program_json, read_program


def written(name):
    """What a folder has of a model: its program, constants, shapes, and config."""
    model, config = make_hybrid(name)
    plan, weights = plan_step(model)
    constants = Constants()
    document = json.loads(json.dumps(program_json(plan, model, config, constants)))
    shapes = {name: weight.shape for name, weight in weights.items()}
    return plan, document, [np.ascontiguousarray(each) for each in constants.arrays], shapes, config


def read(document, constants, shapes, config):
    return read_program(Fields(Path("p"), document), config, shapes, constants)


@pytest.mark.parametrize("name", RECURRENCES)
def test_fused_ops_come_back(name):
    plan, document, constants, shapes, config = written(name)
    again = read(document, constants, shapes, config)
    pairs = zip(plan.ops, again.ops, strict=True)
    recurrent = [pair for pair in pairs if isinstance(pair[0], FusedRecurrence)]
    assert len(recurrent) >= 2
    for ours, theirs in recurrent:
        assert (ours.spec, ours.layer) == (theirs.spec, theirs.layer)
        assert [each.width for each in ours.inputs] == [each.width for each in theirs.inputs]
        for a, b in zip(ours.constants, theirs.constants, strict=True):
            assert a is None or np.array_equal(a.reshape(-1), b)


@pytest.mark.parametrize("name", RECURRENCES)
def test_configs_come_back(name):
    _, config = make_hybrid(name)
    values = json.loads(json.dumps(config_json(config)))
    assert read_config(Fields(Path("p"), values)) == config


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"op": "delta"}, "the model has no 'delta'"),
        ({"op": "layers"}, "the model has no 'layers'"),
        ({"layer": 2}, "is more than any model has"),
        ({"constant_0": 0}, "has the shape"),
        ({"input_0": [0, 44]}, "has 44 numbers, and 276 are read"),
    ],
)
def test_what_does_not_fit_is_refused(change, complaint):
    _, document, constants, shapes, config = written("mamba2")
    ops = copy.deepcopy(document)["phases"]
    place = next(i for i, op in enumerate(ops) if op["kind"] == "recurrence")
    ops[place] |= change
    with pytest.raises(ModelFileError, match=complaint):
        read({**document, "phases": ops}, constants, shapes, config)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": (0, 3)},
        {"layers": (2, 0)},
        {"layers": (0, 1, 2)},
        {"mamba": None},
        {"norm": None},
    ],
)
def test_a_config_that_does_not_fit_together_is_refused(change):
    _, config = make_hybrid("mamba2")
    recurrence = dataclasses.replace(config.recurrence, **change)
    with pytest.raises(ModelFileError):
        dataclasses.replace(config, recurrence=recurrence).check(Path("p"))
