"""Ranks that add up their results say what one rank says; with canonical sums, to the bit.

Ranks are threads, whose tensors go over gloo, and plain ops take the place of kernels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from coded_weights import coded, scattered
from fused_models import CONFIGS, LLAMA, random_model, step_of
from sum_ranks import logits_of_steps

from octavo.base.errors import UnsupportedModelError
from octavo.kernels.fused_ops import FusedSum
from octavo.kernels.parts import Part
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.op_program import plan_step
from octavo.runtime.sum_plan import divide

STEPS = [
    step_of((0, 0, 23), (1, 0, 1), (2, 0, 40)),
    step_of((0, 23, 1), (1, 1, 1), (2, 40, 1)),
    step_of((2, 41, 5), (3, 0, 33), (0, 24, 1), (1, 2, 20)),
]


def assert_nearly(ours, theirs):
    """Within 1e-6 of the largest, which sums of another order of these sizes keep."""
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_say_what_one_rank_says(name, size):
    config, model = CONFIGS[name], random_model(CONFIGS[name])
    alone = logits_of_steps(config, model, 1, STEPS)
    assert_nearly(logits_of_steps(config, model, size, STEPS), alone)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_canonical_sums_do_not_depend_on_ranks(name, size):
    config, model = CONFIGS[name], random_model(CONFIGS[name])
    alone = logits_of_steps(config, model, 1, STEPS, is_canonical=True)
    assert_nearly(alone, logits_of_steps(config, model, 1, STEPS))
    assert torch.equal(logits_of_steps(config, model, size, STEPS, is_canonical=True), alone)


# Units are heads of the attention, and superblocks or groups of the MLP, that come out uneven.
WIDE = replace(
    LLAMA,
    hidden_size=256,
    intermediate_size=5 * 256,
    num_heads=9,
    num_kv_heads=3,
    head_dim=32,
    vocab_size=160,
)
TYPES = ("F16", "Q8_0", "Q4_0", "Q5_1", "IQ4_NL")


@pytest.mark.parametrize("name", TYPES)
def test_formats_of_weights(name):
    model = random_model(WIDE, GGMLType[name])
    steps = STEPS[:2]
    alone = logits_of_steps(WIDE, model, 1, steps)
    for size in (2, 4):
        assert_nearly(logits_of_steps(WIDE, model, size, steps), alone)
    canonical = logits_of_steps(WIDE, model, 1, steps, is_canonical=True)
    for size in (2, 8):
        assert torch.equal(logits_of_steps(WIDE, model, size, steps, is_canonical=True), canonical)


SUPERBLOCKS = replace(WIDE, num_heads=8, num_kv_heads=4, head_dim=64)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_superblocks_are_not_cut(name):
    """Two superblocks of four heads each: more ranks compute the attention whole."""
    model = random_model(SUPERBLOCKS, GGMLType[name])
    alone = logits_of_steps(SUPERBLOCKS, model, 1, STEPS[:2])
    for size in (2, 3, 5):
        assert_nearly(logits_of_steps(SUPERBLOCKS, model, size, STEPS[:2]), alone)
    canonical = logits_of_steps(SUPERBLOCKS, model, 1, STEPS[:2], is_canonical=True)
    for size in (2, 4):
        found = logits_of_steps(SUPERBLOCKS, model, size, STEPS[:2], is_canonical=True)
        assert torch.equal(found, canonical)


def test_groups_that_cannot_be_cut_run_on_one_gpu_alone():
    """With batch_invariant too, which cuts elsewhere."""
    model = random_model(LLAMA)
    plan, weights = plan_step(model)
    scattered_weights = {
        name: scattered(coded(*weight.shape, 4, 16), np.arange(weight.shape[1]) % 3)
        if name.endswith("down_proj.weight")
        else weight
        for name, weight in weights.items()
    }
    with pytest.raises(UnsupportedModelError, match="run it on one GPU"):
        divide(plan, scattered_weights, LLAMA.kv_layers, Part(0, 2), False)
    own = divide(plan, scattered_weights, LLAMA.kv_layers, Part(), True)
    assert len([op for op in own.plan.ops if isinstance(op, FusedSum)]) == LLAMA.num_layers
    assert set(own.weights) > {name for name in weights if name.endswith("down_proj.weight")}


def test_16_bits_of_canonical_sums():
    """Rounded once, after the sum: so they agree in 16 bits, too."""
    model = random_model(LLAMA, GGMLType.BF16)
    options = {"is_canonical": True, "dtype": torch.bfloat16}
    alone = logits_of_steps(LLAMA, model, 1, STEPS, **options)
    assert torch.equal(logits_of_steps(LLAMA, model, 4, STEPS, **options), alone)
