"""What a mix is made of, and how large it may be."""

from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import EMBEDDING
from octavo.models.parameters import Parameters
from octavo.quantize.mixed_precision import MixedPrecisionSearch
from octavo.quantize.scheme import Scheme
from octavo.quantize.writers.compressed_tensors import CompressedTensorsWriter

SCHEMES = [Scheme(4, 16), Scheme(8, 16), None]
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.0.mlp"


@pytest.fixture
def parameters(tiny_model) -> Parameters:
    return Parameters(open_checkpoint(tiny_model))


def of_folder(parameters, target, schemes=SCHEMES) -> MixedPrecisionSearch:
    return MixedPrecisionSearch.of_folder(parameters, target, schemes, CompressedTensorsWriter())


def costs_of(mixing, dear=()):
    """As if every bit halved the error; ``dear`` parameters cost a hundred times as much."""
    return {
        name: [
            (100 if name in dear else 1) * 2.0 ** -(each.num_bits((32, 64)) / 2048) for each in ways
        ]
        for name, ways in mixing.candidates.items()
    }


def test_a_folder_keeps_together_what_servers_fuse(parameters):
    mixing = of_folder(parameters, 12)
    assert EMBEDDING not in mixing.shapes
    items = {tuple(name.split(".")[-2] for name in names) for names in mixing.items}
    assert items == {
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
    }
    mixture = mixing.choose(costs_of(mixing, dear={f"{ATTENTION}.v_proj.weight"}))
    bits = [mixture.chosen[f"{ATTENTION}.{kind}_proj.weight"].name for kind in "qkv"]
    assert len(set(bits)) == 1 and bits[0] != "4 bits"


def test_a_file_has_a_type_for_each_matrix(parameters):
    mixing = MixedPrecisionSearch.of_gguf(parameters, 15)
    assert EMBEDDING in mixing.shapes and all(len(names) == 1 for names in mixing.items)


def test_bits_go_to_what_is_dear_and_the_budget_is_kept(parameters):
    mixing = of_folder(parameters, 12)
    dear = f"{MLP}.down_proj.weight"
    mixture = mixing.choose(costs_of(mixing, {dear}))
    assert mixture.schemes().get(dear) is None
    used = sum(c.num_bits(mixing.shapes[name]) for name, c in mixture.chosen.items())
    assert 0.8 * mixing.budget < used <= mixing.budget
    costs = costs_of(mixing, {dear})
    places = {n: list(mixing.candidates[n]).index(c) for n, c in mixture.chosen.items()}
    assert mixture.divergence == pytest.approx(sum(costs[n][i] for n, i in places.items()))


def test_what_is_said_of_a_choice(parameters):
    mixing = of_folder(parameters, 12)
    document = mixing.choose(costs_of(mixing)).as_json()
    assert document["matrices"].keys() == mixing.shapes.keys()
    assert [*document["kinds"]] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    assert all(sum(counts.values()) == 2 for counts in document["kinds"].values())


@pytest.mark.parametrize("target", [1.0, 17.0, float("nan"), -4.0])
def test_sizes_that_no_mix_has(parameters, target):
    for make in (of_folder, MixedPrecisionSearch.of_gguf):
        with pytest.raises(ConfigError, match=r"no mix has .* target of \d+\.\d\d to 16.\d\d"):
            make(parameters, target)


def test_the_smallest_that_is_named_can_be_had(parameters):
    with pytest.raises(ConfigError) as caught:
        of_folder(parameters, 1)
    least = float(str(caught.value).partition(" target of ")[2].split()[0])
    mixing = of_folder(parameters, least)
    assert {c.name for c in mixing.choose(costs_of(mixing)).chosen.values()} == {"4 bits"}


def test_a_matrix_that_has_no_room_is_named(parameters):
    with pytest.raises(ConfigError, match="layers.0.mlp.down_proj.weight: rows of"):
        of_folder(parameters, 12, [Scheme(4, 24)])
