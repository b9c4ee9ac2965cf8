"""Names of tensors, there and back, and the rows that parameters have of them."""

from __future__ import annotations

import re

import pytest

from octavo.layers.module import named_parameters
from octavo.models.config_hf import config_from_hf
from octavo.models.family import HFNames
from octavo.models.registry import ARCHITECTURES, family_of

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "eos_token_id": 2,
}


# Which of the two layers attends.
LAYERS = {
    "Lfm2ForCausalLM": {"full_attn_idxs": [1]},
    "GraniteMoeHybridForCausalLM": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
    },
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_has_a_name_that_leads_back(architecture):
    family = family_of(architecture)
    config = {**SIZES, **LAYERS.get(architecture, {}), "architectures": [architecture]}
    model_config = config_from_hf(config)
    names = [name for name, _ in named_parameters(family.model(model_config))]
    tables = [family.hf_names] + ([family.names_to_write(model_config)] if family.gguf else [])
    for table in tables:
        wholes = {family.whole(name, table) for name in names}
        tensors: dict[str, set[str]] = {}
        for whole in wholes:
            tensors.setdefault(table.tensor(whole), set()).add(whole)
        for tensor, of in tensors.items():
            if len(of) == 1:
                assert of == {table.parameter(tensor)}
            else:  # of all experts, which are parts of one
                assert {of_each(whole) for whole in of} == {table.parameter(tensor)}
        parts = {part for whole in wholes for part in family.parts(of_each(whole), table)}
        assert parts == set(map(of_each, names))
    if family.gguf:
        theirs = [name for name in map(table.tensor, wholes) if "shortconv" not in name]
        assert not any("proj" in name or "layers" in name for name in theirs)


def of_each(parameter):
    """The name of one that all experts have."""
    return re.sub(r"experts\.\d+\.", "experts.N.", parameter)


def test_parts_of_what_is_fused():
    family = family_of("Phi3ForCausalLM")
    whole = "model.layers.1.self_attn.qkv_proj.weight"
    parts = tuple(f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
    assert family.parts(whole) == parts
    assert {family.whole(part, family.hf_names) for part in parts} == {whole}
    other = "model.layers.1.self_attn.o_proj.weight"
    assert family.parts(other) == (other,) and family.whole(other, family.hf_names) == other


@pytest.mark.parametrize(
    ("tensor", "parameter"),
    [
        ("transformer.h.3.attn.c_attn.bias", "model.layers.3.self_attn.qkv_proj.bias"),
        ("h.3.mlp.c_fc.weight", "model.layers.3.mlp.up_proj.weight"),  # as the first were saved
        ("wpe.weight", "model.embed_positions.weight"),
        ("h.3.attn.bias", None),  # a causal mask
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_gpt2(tensor, parameter):
    names = family_of("GPT2LMHeadModel").hf_names
    assert names.parameter(tensor) == parameter
    assert names.is_transposed(tensor) == (tensor == "h.3.mlp.c_fc.weight")


@pytest.mark.parametrize(
    ("tensor", "parameter"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("vision_tower.encoder.x", None),
        ("model.multi_modal_projector.y", None),
    ],
)
def test_names_of_folders(tensor, parameter):
    assert HFNames().parameter(tensor) == parameter
