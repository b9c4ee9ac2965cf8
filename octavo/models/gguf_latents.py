"""The ``kv_b`` matrix of latent attention, which GGUF files store as two tensors.

llama.cpp multiplies queries with the keys' part of each head, and what was attended with the
values' part, and so keeps ``kv_b`` [H * (P + V), C] as it multiplies with it: ``attn_k_b``
[H, C, P] and ``attn_v_b`` [H, V, C], as files that are written here do. Files from before have all
of it as ``attn_kv_b``, and llama.cpp keeps keys and values of all heads for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.family import ArrayFunction, Joined
from octavo.quantization.ggml_types import GGMLType

if TYPE_CHECKING:
    import numpy as np

    from octavo.models.config import ModelConfig
    from octavo.quantization.base import Weight


def kv_b_halves() -> Joined:
    """``kv_b`` by its two tensors, whose modules are called ``k_b_proj`` and ``v_b_proj`` here."""
    return Joined(("self_attn.k_b_proj", "self_attn.v_b_proj"), _split, _join)


def _split(config: ModelConfig) -> tuple[ArrayFunction, ArrayFunction]:
    """Functions to the keys' part and to the values' part of each head. Views only."""
    latent, num_heads = config.latent, config.num_heads
    assert latent is not None
    nope_dim = latent.nope_dim

    def heads(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(num_heads, -1, rows.shape[1])

    return (
        lambda rows: heads(rows)[:, :nope_dim].swapaxes(1, 2),
        lambda rows: heads(rows)[:, nope_dim:],
    )


def _join(halves: list[Weight]) -> Weight:
    """``kv_b`` in floats: of 16 bits, unless both are float32.

    ValueError if the shapes do not fit; MissingPackageError if they are quantized and PyTorch,
    which dequantizes them, is missing.
    """
    import numpy as np

    from octavo.quantization.base import StoredWeight, entry_of, float_bytes

    keys, values = halves
    heads, rank = keys.shape[0], keys.shape[1]
    if len(keys.shape) != 3 or len(values.shape) != 3:
        raise ValueError(f"the shapes {list(keys.shape)} and {list(values.shape)} have no heads")
    if values.shape[0] != heads or values.shape[2] != rank:
        raise ValueError(f"the shapes {list(keys.shape)} and {list(values.shape)} do not fit")
    each = [(entry_of(keys, i, heads), entry_of(values, i, heads)) for i in range(heads)]
    rows = np.concatenate([half for k, v in each for half in (k.dequantize().T, v.dequantize())])
    types = {weight.type for weight in (keys, values) if isinstance(weight, StoredWeight)}
    is_plain = len(types) == 1 and types <= {GGMLType.F32, GGMLType.BF16}
    type = types.pop() if is_plain else GGMLType.F16
    return StoredWeight(type, float_bytes(np.ascontiguousarray(rows), type), rows.shape)
