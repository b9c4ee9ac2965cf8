"""The ``kv_b`` matrix of latent attention, which GGUF files store as two tensors.

llama.cpp multiplies queries with the keys' part of each head, and what was attended with the
values' part, and so keeps ``kv_b`` [H * (P + V), C] as it multiplies with it: ``attn_k_b``
[H, C, P] and ``attn_v_b`` [H, V, C], as files that are written here do. Files from before have all
of it as ``attn_kv_b``, and llama.cpp keeps keys and values of all heads for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.models.family import ArrayFunction
from octavo.quantization.ggml_types import GGMLType

if TYPE_CHECKING:
    import numpy as np

    from octavo.quantization.base import Weight

_KEYS, _VALUES, _BOTH = ".attn_k_b.weight", ".attn_v_b.weight", ".attn_kv_b.weight"


def find_halves(tensors: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The names of the tensors that ``kv_b`` of each layer is made of, by its own name."""
    names = set(tensors)
    layers = [name.removesuffix(_KEYS) for name in tensors if name.endswith(_KEYS)]
    return {
        layer + _BOTH: (layer + _KEYS, layer + _VALUES)
        for layer in layers
        if layer + _VALUES in names
    }


def halves_to_write(num_heads: int, nope_dim: int) -> dict[str, dict[str, ArrayFunction]]:
    """Split ``kv_b`` into the two tensors of a GGUF file, by the ends of their names. Views
    only."""

    def heads(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(num_heads, -1, rows.shape[1])

    return {
        _BOTH: {
            _KEYS: lambda rows: heads(rows)[:, :nope_dim].swapaxes(1, 2),
            _VALUES: lambda rows: heads(rows)[:, nope_dim:],
        }
    }


def join_halves(keys: Weight, values: Weight) -> Weight:
    """``kv_b`` in floats: of 16 bits, unless both are float32.

    ValueError if the shapes do not fit; MissingPackageError if they are quantized and PyTorch,
    which dequantizes them, is missing.
    """
    import numpy as np

    from octavo.quantization.base import StoredWeight, entry_of, float_bytes

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
