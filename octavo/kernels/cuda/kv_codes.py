"""What vectors of the KV cache are kept as, for kernels: floats, or codes of a byte with scales.

To the bit what ``octavo/kernels/kv_stores.py`` makes of the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.kv_stores import Floats, Fp8, Int8, KVStore, Rotated


def kind_of(store: KVStore) -> str:
    """"float", "int8" or "fp8", as kernels are told."""
    codec = store.codec.codec if isinstance(store.codec, Rotated) else store.codec
    for kind, type_ in {"float": Floats, "int8": Int8, "fp8": Fp8}.items():
        if isinstance(codec, type_):
            return kind
    raise ConfigError(
        f"GPU kernels do not read a KV cache of {type(codec).__name__}; "
        "set --kv-cache-dtype to auto, int8 or fp8"
    )


def pointers(store: KVStore) -> tuple[Tensor, Tensor | None]:
    """The floats or codes [blocks, block_size, Hk, D]; float32 scales [blocks, block_size, Hk]."""
    values, *scales = store.parts
    return values, scales[0] if scales else None


@triton.jit
def code_values(codes, dtype: tl.constexpr, KIND: tl.constexpr):
    """What codes stand for, but for their scales: exact in any float of 16 bits."""
    if KIND == "int8":
        return (codes.to(tl.int16) - 128).to(dtype)
    if KIND == "fp8":
        # The bits of e4m3 are those of a float16 with another bias, 15 in place of 7.
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True) * 256).to(dtype)
    return codes.to(dtype)
