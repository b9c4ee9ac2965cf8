"""Frequencies against transformers, and the tables of cosines and sines."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from weights import stored

from octavo.base.fields import Fields
from octavo.layers.rope import RotaryEmbedding
from octavo.layers.rope_angles import inverse_frequencies
from octavo.layers.rope_config import RopeConfig
from octavo.models.config_hf import _rope

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    transformers.logging.set_verbosity_error()

CPU = torch.device("cpu")
HEAD_DIM, MAX_POSITION = 64, 8192
FACTORS = [1.0 + i / 10 for i in range(HEAD_DIM // 2)]
PARAMETERS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    # As if all dimensions turned as often: the ramp has no width.
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 0.001,
        "beta_slow": 0.001,
    },
    {
        "rope_type": "longrope",
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "long_factor": FACTORS,
        "short_factor": FACTORS[::-1],
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
]


def fields_of(parameters: dict) -> Fields:
    return Fields(Path("config.json"), {"rope_theta": 500_000.0, **parameters})


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: p["rope_type"])
def test_scaled_frequencies_are_those_of_transformers(parameters):
    theirs = LlamaConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 500_000.0, **parameters},
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        theirs, CPU, seq_len=MAX_POSITION
    )
    ours = _rope(fields_of(parameters), HEAD_DIM, MAX_POSITION)
    frequencies = torch.from_numpy(inverse_frequencies(ours, np.arange(3)))
    torch.testing.assert_close(frequencies, expected, rtol=3e-7, atol=0)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: p["rope_type"])
def test_rotations_far_beyond_the_trained_length_are_those_of_transformers(parameters):
    far = 131_072
    theirs = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=far,
        rope_parameters={"rope_theta": 500_000.0, **parameters},
    )
    positions = torch.tensor([[0, 1, 1000, 5000, 40_000, far - 1]])
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    half = HEAD_DIM // 2
    config = _rope(fields_of(parameters), HEAD_DIM, far)
    table = RotaryEmbedding(config).table(far)[positions[0].numpy()]
    expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)
    # Frequencies that differ in their last bit are so far apart after so many positions.
    torch.testing.assert_close(torch.from_numpy(table), expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(torch.from_numpy(table)[:3], expected[:3], rtol=0, atol=2e-4)


def test_dynamic_frequencies_grow_with_the_position():
    ours = RopeConfig(
        theta=10_000.0, rotary_dim=64, scaling="dynamic", factor=2.0, original_max_position=100
    )
    frequencies = torch.from_numpy(inverse_frequencies(ours, np.array([0, 99, 100, 299])))
    unscaled = torch.from_numpy(inverse_frequencies(replace(ours, scaling="default"), np.arange(1)))
    assert torch.equal(frequencies[0], unscaled) and torch.equal(frequencies[1], unscaled)
    theirs = LlamaConfig(
        head_dim=64,
        max_position_embeddings=100,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "dynamic", "factor": 2.0},
    )
    for row, length in ((2, 101), (3, 300)):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, CPU, seq_len=torch.tensor(length))
        torch.testing.assert_close(frequencies[row], expected, rtol=1e-6, atol=0)


def test_table_is_cosines_then_sines_in_float32():
    rope = RotaryEmbedding(RopeConfig(theta=100.0, rotary_dim=4, attention_factor=2.0))
    row = rope.table(4)[3].tolist()
    angles = torch.tensor([3.0, 3.0 / 10])
    assert row == pytest.approx([*(2 * angles.cos()).tolist(), *(2 * angles.sin()).tolist()])


def test_table_grows_on_demand_and_keeps_its_bits():
    config = RopeConfig(theta=1e4, rotary_dim=64, max_position=131_072)
    rope = RotaryEmbedding(config)
    small = rope.table(5)
    assert small.shape == (1024, 64)  # not the 131,072 rows of the whole context
    assert rope.table(1024) is small
    ctx = SimpleNamespace(rope_table=lambda table, rotary_dim: table(5000))
    large = rope(ctx)
    assert large.shape == (5120, 64)
    assert np.array_equal(large[:1024], small)
    assert np.array_equal(large, RotaryEmbedding(config).table(6000)[:5120])


def test_a_table_that_grows_step_by_step_is_seldom_copied():
    rope = RotaryEmbedding(RopeConfig(theta=1e4, rotary_dim=2))
    tables = {id(table): table for table in map(rope.table, range(512, 131_072, 512))}
    assert len(tables) < 40
    assert len(rope.table(1)) < 131_072 * 9 / 8 + 1024


def test_factors_of_the_checkpoint_divide_frequencies():
    config = RopeConfig(theta=100.0, rotary_dim=4, has_freq_factors=True)
    rope = RotaryEmbedding(config)
    rope.freq_factors.load(stored(torch.tensor([1.0, 4.0])))
    plain = RotaryEmbedding(replace(config, has_freq_factors=False)).table(9)
    assert rope.table(9)[8, 1] == plain[2, 1]  # a quarter of the angle
    assert np.array_equal(rope.table(9)[:, 0], plain[:, 0])
