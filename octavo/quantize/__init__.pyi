# Names of the package for type checkers; at run time `__getattr__` imports each when it is used.

from octavo.quantize.calibration import calibration_windows as calibration_windows
from octavo.quantize.explore import bits_against_error as bits_against_error
from octavo.quantize.explore import explore as explore
from octavo.quantize.explore import rows_of as rows_of
from octavo.quantize.grid import QuantizedMatrix as QuantizedMatrix
from octavo.quantize.grid import quantize_to_nearest as quantize_to_nearest
from octavo.quantize.observers import input_statistics as input_statistics
from octavo.quantize.pipeline import quantize_model as quantize_model
from octavo.quantize.rotation import RotatedCheckpoint as RotatedCheckpoint
from octavo.quantize.scheme import Scheme as Scheme

__all__: list[str]
