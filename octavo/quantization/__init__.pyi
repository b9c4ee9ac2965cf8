# Names of the package for type checkers; at run time `__getattr__` imports each when it is used.

from octavo.quantization.ggml_types import GGMLType as GGMLType

__all__: list[str]
