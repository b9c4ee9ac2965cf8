"""Weights as methods make them, and what a writer's folder of them is read as."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from octavo.models.checkpoint import open_checkpoint
from octavo.models.safetensors_writer import NewTensor, write_safetensors
from octavo.quantization.coded import CodedWeight, PlainCodes
from octavo.quantize.grid import Scheme
from octavo.quantize.writers.base import Writer

MODULE = "model.layers.0.mlp.down_proj"


def random_integers(n: int, k: int, scheme: Scheme, seed: int = 0) -> CodedWeight:
    """Codes, zeros that are integers, and scales as float16 has them. Zeros of 0 and of the largest
    code are among those that are not symmetric, beside each other in both directions."""
    rng = np.random.default_rng(seed)
    width = scheme.group_width(k)
    groups = k // width
    zeros = np.full((n, groups), scheme.middle, np.float32)
    if not scheme.symmetric:
        zeros[:] = rng.integers(0, scheme.max_code + 1, zeros.shape)
        zeros[::3] = 0
        zeros[1::6, ::2] = scheme.max_code
    scales = (0.01 + rng.random((n, groups))).astype(np.float16).astype(np.float32)
    codes = rng.integers(0, scheme.max_code + 1, (n, k)).astype(np.uint8)
    coded = PlainCodes(codes)
    return CodedWeight("", (n, k), scheme.bits, width, coded, scales, zeros, 0)


def write(folder: Path, writer: Writer, weight: CodedWeight, scheme: Scheme) -> None:
    """A folder of one weight, as checkpoints have them."""
    writer.check(weight.shape, scheme)
    parts = writer.parts(weight, scheme)
    write_safetensors(
        folder,
        (
            NewTensor(
                f"{MODULE}.{name}",
                part.dtype,
                part.data.shape,
                [np.ascontiguousarray(part.data).reshape(-1).view(np.uint8)],
            )
            for name, part in parts.items()
        ),
    )
    config = {"model_type": "llama", "quantization_config": writer.config(scheme, ["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> CodedWeight:
    weight = open_checkpoint(folder).read(f"{MODULE}.weight")
    assert isinstance(weight, CodedWeight)
    return weight


def assert_same(ours: CodedWeight, theirs: CodedWeight) -> None:
    """Codes, scales and zeros, and so what they stand for."""
    shape = ours.shape[0], ours.num_groups
    assert (ours.shape, ours.bits, ours.num_groups) == (theirs.shape, theirs.bits, shape[1])
    np.testing.assert_array_equal(ours.codes.rows(0, shape[0]), theirs.codes.rows(0, shape[0]))
    for a, b in ((ours.scales, theirs.scales), (ours.zeros, theirs.zeros)):
        np.testing.assert_array_equal(np.broadcast_to(a, shape), np.broadcast_to(b, shape))
    np.testing.assert_array_equal(ours.dequantize(), theirs.dequantize())
