# Where the names of the package are: type checkers read it, and at run time `lazy_exports`.

from octavo.quantization.ggml_types import GGMLType as GGMLType
