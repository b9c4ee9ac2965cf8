"""Bytes of weights and of KV, before anything is loaded."""

from __future__ import annotations

from octavo.models.footprint import (
    checkpoint_bytes,
    kv_blocks_that_fit,
    kv_bytes_per_token,
    kv_bytes_per_token_and_layer,
)
from octavo.models.loader import load_config, load_model, weights_bytes


def test_weights(tiny_model):
    assert checkpoint_bytes(tiny_model) == weights_bytes(load_model(tiny_model).model)


def test_kv(tiny_model):
    config = load_config(tiny_model)
    # Keys and values of 2 heads of 16 float32 values, in 2 layers.
    assert kv_bytes_per_token_and_layer(config, 4) == 2 * 2 * 16 * 4
    assert kv_bytes_per_token(config, 4) == 512
    assert kv_bytes_per_token(config, 2) == 256
    assert kv_blocks_that_fit(config, 512 * 16 * 3 + 1, 16, 4) == 3
    assert kv_blocks_that_fit(config, 0, 16, 4) == 0
