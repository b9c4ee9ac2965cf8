"""What makes keys and values of latents: the parts of a weight, and the memory that they take."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from device_weights import stored

from octavo.kernels.cpu.latent_weights import LatentWeights, planned_bytes
from octavo.kernels.cpu.layout import latent_weight_format
from octavo.kernels.cpu.packing import pack
from octavo.kernels.parts import WHOLE
from octavo.quantization.ggml_types import GGMLType

HEADS, NOPE, ROPE, VALUE, RANK = 3, 5, 4, 9, 64


def op_of(layer: int) -> SimpleNamespace:
    """The fields of a latent attention op that its weights depend on."""
    return SimpleNamespace(
        layer=layer,
        kv_b=f"kv_b of {layer}",
        q=SimpleNamespace(shape=(HEADS, NOPE + ROPE)),
        out=SimpleNamespace(width=HEADS * VALUE),
        norm=SimpleNamespace(weight=np.ones(RANK)),
        rope=SimpleNamespace(rotary_dim=ROPE),
    )


def as_floats(matrices: np.ndarray, inputs: int, outputs: int) -> np.ndarray:
    """[H, inputs, outputs] of what kernels read."""
    if matrices.ndim == 4:  # pairs of inputs, as bits
        values = (matrices.swapaxes(2, 3).astype(np.uint32) << 16).view(np.float32)
        matrices = values.reshape(HEADS, -1, values.shape[-1])
    assert not matrices[:, inputs:].any() and not matrices[:, :, outputs:].any()
    return matrices[:, :inputs, :outputs].astype(np.float32)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_parts_of_a_weight(native, name):
    """They are what the weight is, but for the rounding of codes times scales."""
    rank = 256 if name.endswith("_K") else RANK
    op = op_of(0)
    op.norm.weight = np.ones(rank)
    weight = pack(stored(GGMLType[name], HEADS * (NOPE + VALUE), rank), native.library, native.pool)
    found = LatentWeights(lambda _: weight.as_struct(), native.library, native.pool, WHOLE).of(op)
    wanted = weight.unpack(native.library, native.pool).reshape(HEADS, NOPE + VALUE, rank)
    keys = as_floats(found.keys, NOPE, rank)
    values = as_floats(found.values, rank, VALUE).swapaxes(1, 2)
    error = np.abs(np.concatenate([keys, values], 1) - wanted).max() / np.abs(wanted).max()
    assert error <= (2**-11 if name.startswith("Q") else 0)
    assert found.format == latent_weight_format(weight.spec.format)
    assert found.num_bytes == planned_bytes(op, weight.spec.format)


def test_programs_share_what_was_made(native):
    weight = pack(stored(GGMLType.F32, HEADS * (NOPE + VALUE), RANK), native.library, native.pool)
    asked: list[str] = []

    def packed(matrix):
        asked.append(matrix)
        return weight.as_struct()

    weights = LatentWeights(packed, native.library, native.pool, WHOLE)
    first = weights.of(op_of(0))
    assert weights.of(op_of(0)) is first and weights.of(op_of(1)) is not first
    assert asked == ["kv_b of 0", "kv_b of 1"]
