"""Types of tensors are those that llama-quantize of llama.cpp gave to small random models."""

from __future__ import annotations

import gguf
import pytest

from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_mixes import (
    MIXES,
    ModelFacts,
    file_type,
    type_of,
    wanted_type_of,
)

# Of matrices in all layers: attn_q (and attn_k, ffn_gate and ffn_up, which had the same types),
# attn_v, attn_output, ffn_down. "4xQ5_K Q4_K" is Q5_K in four layers and Q4_K in those after them.
KINDS = ("attn_q", "attn_v", "attn_output", "ffn_down")
OUTER_OF_17 = "2x{0} 2x{1} {0} 2x{1} {0} 2x{1} {0} 2x{1} {0}"
OUTER_OF_9 = "{0} 2x{1} {0} 2x{1} {0}"
OUTER_OF_80 = "10x{0} " + "2x{1} {0} " * 20 + "{0}"

# target: (output, embedding, KINDS)
DEEP_MODEL = {
    "F32": ("", "F32", "F32", "F32", "F32", "F32"),
    "F16": ("", "F16", "F16", "F16", "F16", "F16"),
    "BF16": ("", "BF16", "BF16", "BF16", "BF16", "BF16"),
    "Q4_0": ("", "Q6_K", "Q4_0", "Q4_0", "Q4_0", "Q4_0"),
    "Q4_1": ("", "Q6_K", "Q4_1", "Q4_1", "Q4_1", "Q4_1"),
    "Q5_0": ("", "Q6_K", "Q5_0", "Q5_0", "Q5_0", "Q5_0"),
    "Q5_1": ("", "Q6_K", "Q5_1", "Q5_1", "Q5_1", "Q5_1"),
    "Q8_0": ("", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
    "Q2_K": ("", "Q6_K", "Q2_K", "Q4_K", "Q3_K", "Q3_K"),
    "Q3_K_S": ("", "Q6_K", "Q3_K", "Q3_K", "Q3_K", "Q3_K"),
    "Q3_K_M": ("", "Q6_K", "Q3_K", "2xQ5_K Q4_K", "Q4_K", "Q5_K Q4_K"),
    "Q3_K_L": ("", "Q6_K", "Q3_K", "Q5_K", "Q5_K", "Q5_K"),
    "Q4_K_S": ("", "Q6_K", "Q4_K", "4xQ5_K Q4_K", "Q4_K", "2xQ5_K Q4_K"),
    "Q4_K_M": (
        *("", "Q6_K", "Q4_K", OUTER_OF_17.format("Q6_K", "Q4_K")),
        *("Q4_K", OUTER_OF_17.format("Q6_K", "Q4_K")),
    ),
    "Q5_K_S": ("", "Q6_K", "Q5_K", "Q5_K", "Q5_K", "Q5_K"),
    "Q5_K_M": (
        *("", "Q6_K", "Q5_K", OUTER_OF_17.format("Q6_K", "Q5_K")),
        *("Q5_K", OUTER_OF_17.format("Q6_K", "Q5_K")),
    ),
    "Q6_K": ("", "Q6_K", "Q6_K", "Q6_K", "Q6_K", "Q6_K"),
    "IQ4_NL": ("", "Q6_K", "IQ4_NL", "Q5_K", "IQ4_NL", "2xQ5_K IQ4_NL"),
    "IQ4_XS": ("", "Q6_K", "IQ4_XS", "Q5_K", "IQ4_XS", "2xQ5_K IQ4_XS"),
}

WITH_IMPORTANCE = {
    "Q4_0": ("", "Q6_K", "Q4_0", "Q4_0", "Q4_0", "2xQ4_1 Q4_0"),
    "Q5_0": ("", "Q6_K", "Q5_0", "Q5_0", "Q5_0", "2xQ5_1 Q5_0"),
    "IQ4_NL": ("", "Q6_K", "IQ4_NL", "Q5_K", "IQ4_NL", "IQ4_NL"),
    "IQ4_XS": ("", "Q6_K", "IQ4_XS", "Q5_K", "IQ4_XS", "IQ4_XS"),
    "Q4_K_M": DEEP_MODEL["Q4_K_M"],
}

# Its ffn_down has rows of 320 values, which are no multiple of 256.
ODD_MODEL = {
    "Q4_0": ("Q6_K", "Q4_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
    "Q2_K": ("Q6_K", "Q2_K", "Q2_K", "Q3_K", "Q3_K", "Q4_0"),
    "Q3_K_S": ("Q6_K", "Q3_K", "Q3_K", "Q3_K", "Q3_K", "Q4_0"),
    "Q3_K_M": ("Q6_K", "Q3_K", "Q3_K", "2xQ5_K Q4_K", "Q4_K", "Q5_0"),
    "Q3_K_L": ("Q6_K", "Q3_K", "Q3_K", "Q5_K", "Q5_K", "Q5_1"),
    "Q4_K_S": ("Q6_K", "Q4_K", "Q4_K", "4xQ5_K Q4_K", "Q4_K", "Q5_1 Q5_0"),
    "Q4_K_M": (
        *("Q6_K", "Q4_K", "Q4_K", OUTER_OF_9.format("Q6_K", "Q4_K")),
        *("Q4_K", OUTER_OF_9.format("Q8_0", "Q5_0")),
    ),
    "Q5_K_S": ("Q6_K", "Q5_K", "Q5_K", "Q5_K", "Q5_K", "Q5_1"),
    "Q5_K_M": (
        *("Q6_K", "Q5_K", "Q5_K", OUTER_OF_9.format("Q6_K", "Q5_K")),
        *("Q5_K", OUTER_OF_9.format("Q8_0", "Q5_1")),
    ),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K", "Q6_K", "Q6_K", "Q8_0"),
    "IQ4_NL": ("Q6_K", "IQ4_NL", "IQ4_NL", "IQ4_NL", "IQ4_NL", "Q5_1 IQ4_NL"),
    "IQ4_XS": ("Q6_K", "IQ4_XS", "IQ4_XS", "IQ4_XS", "IQ4_XS", "Q5_1 IQ4_NL"),
}

# Rows of 96 values, and 336 in ffn_down, which are not even a multiple of 32.
NARROW_MODEL = {
    "F16": ("F16", "F16", "F16", "F16", "F16", "F16"),
    "Q4_0": ("Q8_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0", "F16"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "F16"),
    "Q2_K": ("Q8_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0", "F16"),
    "Q3_K_M": ("Q8_0", "Q4_0", "Q4_0", "2xQ5_1 Q5_0", "Q5_0", "F16"),
    "Q4_K_M": ("Q8_0", "Q5_0", "Q5_0", "2xQ5_0 Q8_0", "Q5_0", "F16"),
    "Q5_K_M": ("Q8_0", "Q5_1", "Q5_1", "2xQ5_1 Q8_0", "Q5_1", "F16"),
    "Q6_K": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "F16"),
    "IQ4_XS": ("Q8_0", "IQ4_NL", "IQ4_NL", "IQ4_NL", "IQ4_NL", "F16"),
}

MODEL_LIKE_70B = {
    "Q2_K": ("Q6_K", "Q2_K", "Q2_K", "Q5_K", "Q3_K", "Q3_K"),
    "Q3_K_S": ("Q6_K", "Q3_K", "Q3_K", "Q5_K", "Q3_K", "Q3_K"),
    "Q4_K_M": (
        *("Q6_K", "Q4_K", "Q4_K", OUTER_OF_80.format("Q6_K", "Q5_K")),
        *("Q4_K", OUTER_OF_80.format("Q6_K", "Q4_K")),
    ),
    "Q5_K_S": ("Q6_K", "Q5_K", "Q5_K", "Q5_K", "Q5_K", "Q5_K"),
}

# (what is known of the model, values of a row, values of a row of ffn_down, recorded types)
MODELS = {
    "deep": (ModelFacts(17, 8, 2, is_tied=True), 256, 512, DEEP_MODEL),
    "importance": (ModelFacts(17, 8, 2, True, has_importance=True), 256, 512, WITH_IMPORTANCE),
    "odd": (ModelFacts(9, 4, 2, is_tied=False), 256, 320, ODD_MODEL),
    "narrow": (ModelFacts(3, 3, 1, is_tied=False), 96, 336, NARROW_MODEL),
    "70b": (ModelFacts(80, 8, 2, is_tied=False), 256, 256, MODEL_LIKE_70B),
}
CASES = [(model, target) for model, (_, _, _, recorded) in MODELS.items() for target in recorded]


def in_layers(runs: str, num_layers: int) -> list[GGMLType]:
    types: list[GGMLType] = []
    for run in runs.split():
        count, _, name = run.rpartition("x")
        types += [GGMLType[name]] * int(count or 1)
    return types + types[-1:] * (num_layers - len(types))


@pytest.mark.parametrize(("model", "target"), CASES)
def test_types_are_those_of_llama_quantize(model: str, target: str) -> None:
    facts, columns, inner, recorded = MODELS[model]
    output, embedding, *kinds = recorded[target]
    assert type_of("token_embd.weight", (64, columns), target, facts).name == embedding
    if output:
        assert type_of("output.weight", (64, columns), target, facts).name == output
    for kind, runs in zip(KINDS, kinds, strict=True):
        shape = (columns, inner if kind == "ffn_down" else columns)
        names = [f"blk.{layer}.{kind}.weight" for layer in range(facts.num_layers)]
        types = [type_of(name, shape, target, facts) for name in names]
        assert types == in_layers(runs, facts.num_layers), kind
    for kind in ("attn_k", "ffn_gate", "ffn_up"):
        same = type_of("blk.1.attn_q.weight", (columns, columns), target, facts)
        assert type_of(f"blk.1.{kind}.weight", (columns, columns), target, facts) == same


def test_every_target_is_recorded() -> None:
    assert set(DEEP_MODEL) == set(MIXES)


@pytest.mark.parametrize("target", ["F16", "Q4_0", "Q4_K_M"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("output_norm.weight", (256,)),
        ("blk.0.attn_q_norm.weight", (64,)),
        ("blk.0.attn_q_norm.weight", (4, 64)),
        ("rope_freqs.weight", (32,)),
        ("blk.0.attn_q.bias", (256,)),
        ("blk.0.attn_v.bias", (1, 256)),
    ],
)
def test_what_is_small_stays_f32(target: str, name: str, shape: tuple[int, ...]) -> None:
    assert type_of(name, shape, target, MODELS["deep"][0]) == GGMLType.F32


@pytest.mark.parametrize("target", MIXES)
def test_what_makes_keys_and_values_of_latents_is_floats(target: str) -> None:
    """Rows of keys are columns of what a model has, and no blocks; octavo reads floats natively."""
    expected = GGMLType[target] if target in ("F32", "BF16") else GGMLType.F16
    shapes = {"attn_k_b": (512, 128), "attn_v_b": (128, 512), "attn_kv_b": (4096, 512)}
    for name, shape in shapes.items():
        for ask in (type_of, wanted_type_of):
            assert ask(f"blk.3.{name}.weight", shape, target, MODELS["deep"][0]) == expected
    others = type_of("blk.3.attn_q_b.weight", (512, 512), target, MODELS["deep"][0])
    assert others == MIXES[target].base


def test_file_types_are_those_of_the_gguf_package() -> None:
    for target in MIXES:
        name = {"F32": "ALL_F32"}.get(target, f"MOSTLY_{target}")
        assert file_type(target) == gguf.LlamaFileType[name]


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match=r"'IQ2_XXS' is no target.*'Q4_K_M'"):
        type_of("token_embd.weight", (64, 256), "IQ2_XXS", MODELS["deep"][0])
    with pytest.raises(ValueError, match="'q4_k_m' is no target"):
        file_type("q4_k_m")
