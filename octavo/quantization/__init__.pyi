# Names of the package for type checkers; at run time `__getattr__` imports each when it is used.

from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_quantize import quantize as quantize_to_blocks

__all__ = [
    "GGMLType",
    "quantize_to_blocks",
]
