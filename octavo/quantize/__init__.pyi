# Names of the package for type checkers; at run time `__getattr__` imports each when it is used.

from octavo.quantize.calibration import calibration_windows
from octavo.quantize.gptq import gptq as quantize_gptq
from octavo.quantize.grid import QuantizedMatrix, quantize_to_nearest
from octavo.quantize.layerwise_model import input_statistics
from octavo.quantize.pipeline import quantize_model
from octavo.quantize.rotation import RotatedCheckpoint
from octavo.quantize.scheme import Scheme
from octavo.quantize.scheme_comparison import bits_against_error, explore, rows_of

__all__ = [
    "QuantizedMatrix",
    "RotatedCheckpoint",
    "Scheme",
    "bits_against_error",
    "calibration_windows",
    "explore",
    "input_statistics",
    "quantize_gptq",
    "quantize_model",
    "quantize_to_nearest",
    "rows_of",
]
