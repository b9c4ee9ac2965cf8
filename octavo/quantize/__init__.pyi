# Where the names of the package are: type checkers read it, and at run time `lazy_exports`.

from octavo.quantize.calibration import calibration_windows as calibration_windows
from octavo.quantize.gptq import quantize_gptq as quantize_gptq
from octavo.quantize.grid import (
    QuantizedMatrix as QuantizedMatrix,
)
from octavo.quantize.grid import (
    quantize_to_nearest as quantize_to_nearest,
)
from octavo.quantize.layerwise_model import input_statistics as input_statistics
from octavo.quantize.pipeline import quantize_model as quantize_model
from octavo.quantize.rotation import RotatedCheckpoint as RotatedCheckpoint
from octavo.quantize.scheme import Scheme as Scheme
from octavo.quantize.scheme_comparison import (
    bits_against_error as bits_against_error,
)
from octavo.quantize.scheme_comparison import (
    explore as explore,
)
from octavo.quantize.scheme_comparison import (
    rows_of as rows_of,
)
