# Where the names of the package are: type checkers read it, and at run time `lazy_exports`.

from octavo.quantization.ggml_types import GGMLType as GGMLType
from octavo.quantization.gguf_quantize import quantize_to_blocks as quantize_to_blocks
