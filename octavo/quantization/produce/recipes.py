"""What can be asked for: methods, the formats that hold what they make, and what is left open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.quantization.gguf_mixes import MIXES
from octavo.quantization.levels import NF4_BLOCK
from octavo.quantization.produce.scheme import GroupSize, Scheme
from octavo.quantization.produce.writers.awq import AWQWriter
from octavo.quantization.produce.writers.base import Writer
from octavo.quantization.produce.writers.bitsandbytes import NF4Writer
from octavo.quantization.produce.writers.compressed_tensors import (
    CompressedTensorsWriter,
    FP8Writer,
    Int8Writer,
)
from octavo.quantization.produce.writers.fp8 import FP8BlockWriter
from octavo.quantization.produce.writers.gptq import GPTQWriter

_INTEGERS: dict[str, Callable[[], Writer]] = {
    "compressed-tensors": CompressedTensorsWriter,
    "gptq": GPTQWriter,
    "awq": AWQWriter,
}
_GROUP_SIZES = (128, 64, 32)
DEFAULT_TYPE = "Q4_K_M"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to quantize.

    Args:
        help: what it does, in a line.
        writers: the formats that hold what it makes, the default first.
        fixed: the scheme, where the format of the codes leaves no choice.
        calibrated: whether it looks at what the model computes of a text.
        needs_text: whether it cannot do without.
        trains: whether it goes through its text again and again, for as long as it is given.
    """

    help: str
    writers: dict[str, Callable[[], Writer]]
    fixed: Scheme | None = None
    calibrated: bool = False
    needs_text: bool = False
    trains: bool = False

    @property
    def has_scheme(self) -> bool:
        """Whether bits, groups and zeros are for the user to choose."""
        return self.fixed is None and bool(self.writers)


METHODS = {
    "gptq": Method(
        "integers that make up for each other's errors on a text",
        {"gptq": GPTQWriter, **_INTEGERS},
        calibrated=True,
        needs_text=True,
    ),
    "awq": Method(
        "integers with zeros, after channels were scaled so that they round better",
        {"awq": AWQWriter, **_INTEGERS},
        calibrated=True,
        needs_text=True,
    ),
    "smoothquant": Method(
        "integers of 8 bits, for activations of 8 bits whose outliers were scaled down",
        {"compressed-tensors": Int8Writer},
        Scheme(8, "channel"),
        calibrated=True,
        needs_text=True,
    ),
    "rtn": Method(
        "integers, to the nearest, with scales of least error on a text",
        _INTEGERS,
        calibrated=True,
    ),
    "autoround": Method(
        "integers learned for a layer as a whole on a text, for 2 bits",
        _INTEGERS,
        calibrated=True,
        needs_text=True,
    ),
    "qat": Method(
        "integers whose scales a whole model was trained for on a text, for 2 and 3 bits",
        _INTEGERS,
        calibrated=True,
        needs_text=True,
        trains=True,
    ),
    "gguf": Method("the types of llama.cpp, see --type", {}, calibrated=True),
    "fp8": Method(
        "floats of 8 bits (e4m3)",
        {"compressed-tensors": FP8Writer, "fp8": FP8BlockWriter},
        Scheme(8, "channel", table="e4m3"),
        calibrated=True,
    ),
    "nf4": Method(
        "the 4 bits of QLoRA",
        {"bnb": NF4Writer},
        Scheme(4, NF4_BLOCK, table="nf4"),
        calibrated=True,
    ),
}
FORMATS = tuple(dict.fromkeys([*(f for m in METHODS.values() for f in m.writers), "gguf"]))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user asks for; None leaves it to octavo.

    Args:
        type: of GGUF files, as ``MIXES`` has them.
        calibration: a file of text; None is the text that comes with octavo.
        calibration_tokens: how many of its tokens are looked at, at most.
        train_tokens: how many tokens are trained on in all, those looked at again counted again.
        train_codes: whether codes are trained too, and not scales alone.
        calibrate: whether any text is looked at, of methods that can do without.
        requantize: whether a model that is quantized already may be quantized again.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    type: str | None = None
    format: str | None = None
    calibration: Path | None = None
    calibration_tokens: int | None = None
    train_tokens: int | None = None
    train_codes: bool = False
    calibrate: bool = True
    requantize: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"no method {self.method!r}; known: {', '.join(METHODS)}")
        method = METHODS[self.method]
        if self.type is not None and self.method != "gguf":
            raise ConfigError(f"type {self.type} is of method gguf, not of {self.method}")
        if self.type is not None and self.type.upper() not in MIXES:
            raise ConfigError(f"no type {self.type!r}; known: {', '.join(MIXES)}")
        formats = tuple(method.writers) or ("gguf",)
        if self.format is not None and self.format not in formats:
            raise ConfigError(
                f"format {self.format} does not hold what {self.method} makes: {', '.join(formats)}"
            )
        if not method.has_scheme:
            for name in ("bits", "group_size", "symmetric"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"method {self.method} has no {name} to choose: leave it out")
        if not method.calibrated and (self.calibration or self.calibration_tokens):
            raise ConfigError(f"method {self.method} looks at no text: leave calibration out")
        if self.format == "fp8" and (self.calibration or self.calibration_tokens):
            raise ConfigError("blocks of FP8 are made without a text: leave calibration out")
        if not method.trains and (self.train_tokens is not None or self.train_codes):
            raise ConfigError(
                f"method {self.method} does not train: leave train_tokens and train_codes out"
            )
        if method.needs_text and not self.calibrate:
            raise ConfigError(f"method {self.method} needs a text: use rtn to do without")

    @property
    def target(self) -> str:
        """The type of GGUF files."""
        return (self.type or DEFAULT_TYPE).upper()

    @property
    def format_name(self) -> str:
        return self.format or next(iter(METHODS[self.method].writers), "gguf")

    def writer(self) -> Writer:
        return METHODS[self.method].writers[self.format_name]()

    def scheme(self, widths: Iterable[int]) -> Scheme:
        """The scheme, for matrices with so many inputs."""
        fixed = METHODS[self.method].fixed
        if fixed is not None:
            return fixed
        group_size: GroupSize = "channel"
        if self.group_size is None:
            widths = set(widths)
            fitting = [size for size in _GROUP_SIZES if not any(width % size for width in widths)]
            group_size = fitting[0] if fitting else "channel"
        elif self.group_size != -1:
            group_size = self.group_size
        # AWQ's files have zeros anyway, and its scales gain by them.
        has_zeros = "awq" in (self.method, self.format_name)
        symmetric = not has_zeros if self.symmetric is None else self.symmetric
        return Scheme(self.bits or 4, group_size, symmetric)
