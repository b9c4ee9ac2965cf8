"""Bytes of weights and of KV, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checkpoint_sizes import checkpoint_bytes
from hybrid_models import RECURRENCES
from loading import load_config, load_model

from octavo.base.errors import ConfigError, UnsupportedModelError
from octavo.layers.latent_config import LatentConfig
from octavo.layers.linear import Linear, LMHead
from octavo.models.checkpoint import open_checkpoint
from octavo.models.footprint import (
    WeightMatrix,
    as_stored,
    kv_bytes_per_token,
    matrices,
    native_kv_bytes_per_token,
    shapes,
    weight_types,
)
from octavo.models.loader import weights_bytes
from octavo.models.registry import ARCHITECTURES, model_class
from octavo.quantization.ggml_types import GGMLType


@pytest.fixture(scope="module")
def config(tiny_model):
    return load_config(tiny_model)


def test_weights(tiny_model):
    assert checkpoint_bytes(tiny_model) == weights_bytes(load_model(tiny_model).model)


def test_kv(tiny_model):
    config = load_config(tiny_model)
    # Keys and values of 2 heads of 16 float32 values, in 2 layers.
    assert kv_bytes_per_token(config, "float32") == 2 * 2 * 2 * 16 * 4
    assert kv_bytes_per_token(config, "bfloat16") == kv_bytes_per_token(config, "float16") == 256
    # A byte each, and the scales of a key and of a value, of 2 heads in 2 layers.
    assert kv_bytes_per_token(config, "int8") == 128 + 2 * 2 * 8
    assert kv_bytes_per_token(config, "fp8") == 128 + 2 * 2 * 8
    # Half a byte each, and a scale and a minimum of two bytes.
    assert kv_bytes_per_token(config, "int4") == 64 + 2 * 2 * 8
    assert kv_bytes_per_token(config, "k8v4") == 96 + 2 * 2 * 8
    odd = replace(config, head_dim=15)
    for dtype in ("float32", "bfloat16", "fp8", "int4", "k8v4"):  # a zero behind each head
        assert kv_bytes_per_token(odd, dtype) == kv_bytes_per_token(config, dtype)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_matrices_are_those_of_the_model(config, architecture):
    """By name and shape, without a weight: a model whose matrices are others breaks this."""
    config = replace(config, architecture=architecture, layer_windows=(None, 8))
    if architecture.startswith("Deepseek"):
        config = replace(config, latent=LatentConfig(12, 20, 8, 4, 6))
    if architecture.startswith("Falcon"):
        _, recurrence = RECURRENCES["mamba2_scaled"]
        config = replace(config, recurrence=replace(recurrence, layers=(0, 1), parallel=True))
    modules = model_class(architecture)(config).named_modules()
    expected = [
        (f"{name}.weight", *module.weight.shape)
        for name, module in modules
        if isinstance(module, Linear | LMHead)
    ]
    assert sorted(shape[:3] for shape in shapes(config)) == sorted(expected)


def test_matrices_of_any_type(config):
    params = sum(shape.n * shape.k for shape in shapes(config))
    for bits, type in ((16, GGMLType.BF16), (32, GGMLType.F32)):
        stored = matrices(config, type, as_stored)
        assert sum(matrix.num_params for matrix in stored) == params
        assert sum(matrix.num_bytes for matrix in stored) == params * bits / 8
    (head,) = [matrix for matrix in matrices(config, GGMLType.BF16) if matrix.is_head]
    assert head == WeightMatrix(
        True, 260 * 48, 272 * 48 * 2, "bfloat16"
    )  # whole tiles of 16 outputs
    with pytest.raises(UnsupportedModelError, match=r"q_proj.*cannot run IQ1_S"):
        matrices(config, GGMLType.IQ1_S)


def test_types_come_from_the_table_of_the_file(tiny_model):
    checkpoint = open_checkpoint(tiny_model)
    config = checkpoint.config()
    types = weight_types(checkpoint, config)
    assert {types[shape.name] for shape in shapes(config)} == {GGMLType.F32}
    types["model.layers.1.mlp.down_proj.weight"] = GGMLType.BF16
    mixed = [matrix.arithmetic for matrix in matrices(config, types)]
    assert mixed.count("bfloat16") == 1 and mixed[13] == "bfloat16"


def test_native_kv(config):
    assert native_kv_bytes_per_token(config) == kv_bytes_per_token(config, "bfloat16")
    with pytest.raises(ConfigError, match="no native KV cache of float16: bfloat16, float32, int8"):
        native_kv_bytes_per_token(config, "float16")
