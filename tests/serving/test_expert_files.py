"""Files of experts: what is written is read, and what is not about the model is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fused_models import CONFIGS

from octavo.base.errors import ConfigError
from octavo.cost.expert_placement import place_experts
from octavo.kernels.expert_places import deal_out
from octavo.serving.expert_files import (
    placement_of,
    read_loads,
    write_loads,
    write_placement,
)

MODEL = CONFIGS["mixtral"]
NUM_EXPERTS, NUM_LAYERS = MODEL.experts.routing.num_experts, sum(MODEL.experts.layers)
LOADS = [[7 * expert % 5 + layer for expert in range(NUM_EXPERTS)] for layer in range(NUM_LAYERS)]


@pytest.fixture
def placement(tmp_path):
    write_loads(tmp_path / "loads.json", MODEL, LOADS)
    counted = read_loads(tmp_path / "loads.json")
    assert counted.loads == LOADS
    places = place_experts(counted.loads, 2, NUM_EXPERTS)
    write_placement(tmp_path / "placement.json", counted, places, 2)
    return tmp_path / "placement.json", places


def test_a_placement_is_what_was_written(placement):
    path, places = placement
    assert placement_of(str(path), MODEL)(2) == places


def test_without_a_file_experts_are_in_order():
    assert placement_of(None, MODEL)(3).layers == (deal_out(NUM_EXPERTS, 3),) * NUM_LAYERS


def test_a_model_without_experts_has_none_to_place():
    with pytest.raises(ConfigError, match="has no experts; leave it off"):
        placement_of(None, CONFIGS["llama"])


def test_other_numbers_of_ranks_are_refused(placement):
    with pytest.raises(ConfigError, match="on 2 ranks, and these are 3"):
        placement_of(str(placement[0]), MODEL)(3)


def test_other_models_are_refused(placement):
    other = replace(MODEL, architecture="OlmoeForCausalLM")
    with pytest.raises(ConfigError, match="it places .* of MixtralForCausalLM"):
        placement_of(str(placement[0]), other)


def test_another_name_is_a_warning(placement, caplog):
    placement_of(str(placement[0]), replace(MODEL, name="tuned"))
    assert "places the experts of tuned" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "does not say that it is"),
        ({"ranks": [[[0]]]}, "places 1 experts in each of 1 layers"),
        ({"ranks": [[[]]]}, "damaged"),
        ({"ranks": 5}, "damaged"),
        ({"num_ranks": 1}, "must be on ranks 0 to 0"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_ranks": 3}, "rank 2 has no expert"),
        ({"ranks": [[[1, 0]] * NUM_EXPERTS] * NUM_LAYERS}, "in ascending order"),
        ({"ranks": [[["a"]] * NUM_EXPERTS] * NUM_LAYERS}, "must be on ranks"),
    ],
)
def test_damaged_placements_are_refused(placement, change, said):
    path = placement[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=said):
        placement_of(str(path), MODEL)(2)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, "{}"])
def test_what_is_no_such_file(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"file\.json: it"):
        read_loads(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        placement_of(str(tmp_path / "none.json"), MODEL)


@pytest.mark.parametrize("loads", [[], [[1], [1, 2]], [[-1]], [[1.5]], [[True]], "x"])
def test_damaged_loads_are_refused(tmp_path, loads):
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({"format": "octavo expert loads 1", "loads": loads}))
    with pytest.raises(ConfigError, match="damaged"):
        read_loads(path)
