"""The quantization methods, the formats that hold their results, and the request of a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.quantization.gguf_mixes import MIXES
from octavo.quantization.levels import NF4_BLOCK
from octavo.quantize.scheme import GroupSize, Scheme
from octavo.quantize.writers.awq import AWQWriter
from octavo.quantize.writers.base import MixedWriter, Writer
from octavo.quantize.writers.bitsandbytes import NF4Writer
from octavo.quantize.writers.compressed_tensors import (
    CompressedTensorsWriter,
    FP8Writer,
    Int8Writer,
)
from octavo.quantize.writers.fp8 import FP8BlockWriter
from octavo.quantize.writers.gptq import GPTQWriter

_INTEGERS: dict[str, Callable[[], Writer]] = {
    "compressed-tensors": CompressedTensorsWriter,
    "gptq": GPTQWriter,
    "awq": AWQWriter,
}
_GROUP_SIZES = (128, 64, 32)
DEFAULT_TYPE = "Q4_K_M"

# The formats that hold mixed precision, and the default bits of a mix.
_MIXED: dict[str, Callable[[], MixedWriter]] = {"compressed-tensors": CompressedTensorsWriter}
_FLOAT_BITS = 16
MIX_BITS = (2, 3, 4, 5, 6, 8, _FLOAT_BITS)


@dataclass(frozen=True, slots=True)
class QuantizeMethod:
    """A quantization method.

    Args:
        help: a line that describes it.
        writers: the formats that hold its results, the default first.
        fixed: its only scheme; None if the user can choose one.
        calibrated: whether it can use calibration text.
        needs_text: whether it cannot do without.
        trains: whether it goes through the text repeatedly, for as many tokens as it is given.
    """

    help: str
    writers: dict[str, Callable[[], Writer]]
    fixed: Scheme | None = None
    calibrated: bool = False
    needs_text: bool = False
    trains: bool = False

    @property
    def has_scheme(self) -> bool:
        """True if the user can choose bits, groups and zeros."""
        return self.fixed is None and bool(self.writers)


METHODS = {
    "gptq": QuantizeMethod(
        "integers whose errors compensate each other on calibration text",
        {"gptq": GPTQWriter, **_INTEGERS},
        calibrated=True,
        needs_text=True,
    ),
    "awq": QuantizeMethod(
        "integers with zero points, with input channels scaled by their activations",
        {"awq": AWQWriter, **_INTEGERS},
        calibrated=True,
        needs_text=True,
    ),
    "smoothquant": QuantizeMethod(
        "8-bit integers for 8-bit activations, whose outliers are scaled down",
        {"compressed-tensors": Int8Writer},
        Scheme(8, "channel"),
        calibrated=True,
        needs_text=True,
    ),
    "rtn": QuantizeMethod(
        "integers, rounded to nearest, with scales of least error on calibration text",
        _INTEGERS,
        calibrated=True,
    ),
    "autoround": QuantizeMethod(
        "integers learned for each layer as a whole on calibration text, for 2 bits",
        _INTEGERS,
        calibrated=True,
        needs_text=True,
    ),
    "qat": QuantizeMethod(
        "integers with scales trained for the whole model on calibration text, for 2 and 3 bits",
        _INTEGERS,
        calibrated=True,
        needs_text=True,
        trains=True,
    ),
    "gguf": QuantizeMethod("the types of llama.cpp, see --type", {}, calibrated=True),
    "fp8": QuantizeMethod(
        "floats of 8 bits (e4m3)",
        {"compressed-tensors": FP8Writer, "fp8": FP8BlockWriter},
        Scheme(8, "channel", table="e4m3"),
        calibrated=True,
    ),
    "nf4": QuantizeMethod(
        "4-bit NF4 of QLoRA, in bitsandbytes' format",
        {"bnb": NF4Writer},
        Scheme(4, NF4_BLOCK, table="nf4"),
        calibrated=True,
    ),
}


def _flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


FORMATS = tuple(dict.fromkeys([*(f for m in METHODS.values() for f in m.writers), "gguf"]))


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """The settings of a quantization; None is the method's default.

    Args:
        method: one of ``METHODS``.
        type: the type of a GGUF file, one of ``MIXES``.
        calibration: a file of calibration text; None is the built-in text.
        calibration_tokens: the most tokens of it that are used.
        train_tokens: the tokens of all training steps, repeated ones counted again.
        train_codes: whether codes are trained too, and not scales alone.
        calibrate: whether calibration text is used, by methods that can do without.
        requantize: whether a quantized model may be quantized again.
        rotate: whether the model is rotated before; see ``rotation.py``.
        target_bpw: the most bits per weight, over all tensors: each matrix gets the bits that
            lower the error most. None: all have the same, or those of ``type``.
        mix_bits: the bits that matrices of a folder may get in a mix, of 2 to 8 and 16.
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
    rotate: bool = False
    target_bpw: float | None = None
    mix_bits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"no method {self.method!r}; known: {', '.join(METHODS)}")
        method = METHODS[self.method]
        if self.type is not None and self.method != "gguf":
            raise ConfigError(f"--type {self.type} is of --method gguf, not of {self.method}")
        if self.type is not None and self.type.upper() not in MIXES:
            raise ConfigError(f"no --type {self.type!r}; known: {', '.join(MIXES)}")
        formats = tuple(method.writers) or ("gguf",)
        if self.format is not None and self.format not in formats:
            raise ConfigError(
                f"--format {self.format} does not hold what --method {self.method} makes: "
                f"{', '.join(formats)}"
            )
        if not method.has_scheme:
            for name in ("bits", "group_size", "symmetric"):
                if getattr(self, name) is not None:
                    flag = {"symmetric": "--symmetric or --asymmetric"}.get(name, _flag(name))
                    raise ConfigError(f"--method {self.method} has no {flag}: leave it out")
        if not method.calibrated and (self.calibration or self.calibration_tokens):
            raise ConfigError(
                f"--method {self.method} looks at no text: leave --calibration and "
                "--calibration-tokens out"
            )
        if self.format == "fp8" and (self.calibration or self.calibration_tokens):
            raise ConfigError(
                "--format fp8 is made without a text: leave --calibration and "
                "--calibration-tokens out"
            )
        if not method.trains and (self.train_tokens is not None or self.train_codes):
            raise ConfigError(
                f"--method {self.method} does not train: leave --train-tokens and --train-codes out"
            )
        if method.needs_text and not self.calibrate:
            raise ConfigError(
                f"--method {self.method} needs a text: leave --no-calibration out, or take "
                "--method rtn"
            )
        if self.target_bpw is not None:
            self._check_mix(method)
        elif self.mix_bits is not None:
            raise ConfigError("--mix-bits needs --target-bpw: give both, or none")

    def _check_mix(self, method: QuantizeMethod) -> None:
        """Raise a ConfigError if ``target_bpw`` contradicts another setting."""
        is_file = self.method == "gguf"
        if not (is_file or method.has_scheme):
            able = [name for name, each in METHODS.items() if each.has_scheme]
            raise ConfigError(
                f"--method {self.method} has one scheme for all matrices, and no --target-bpw: "
                f"{', '.join([*able, 'gguf'])} have it"
            )
        if self.format_name not in (*_MIXED, "gguf"):
            raise ConfigError(
                f"--format {self.format} has one scheme for all matrices, and no --target-bpw: "
                f"--format {' or '.join(_MIXED)} has it, and --method gguf"
            )
        for name in ("bits", "type"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"--target-bpw says how many bits there are: leave {_flag(name)} out"
                )
        if not self.calibrate:
            raise ConfigError(
                "--target-bpw needs a text, to see what matrices are worth: leave "
                "--no-calibration out"
            )
        if self.mix_bits is None:
            return
        if is_file:
            raise ConfigError("--mix-bits is of folders: --method gguf has types of its own")
        known = (*range(2, 9), _FLOAT_BITS)
        if not self.mix_bits or not set(self.mix_bits) <= set(known):
            raise ConfigError(f"--mix-bits are of 2 to 8 and 16, not {list(self.mix_bits)}")

    @property
    def target(self) -> str:
        """The type of a GGUF file."""
        return (self.type or DEFAULT_TYPE).upper()

    @property
    def format_name(self) -> str:
        if self.format is not None:
            return self.format
        if self.method == "gguf":
            return "gguf"
        return next(iter(METHODS[self.method].writers if self.target_bpw is None else _MIXED))

    def writer(self) -> Writer:
        return METHODS[self.method].writers[self.format_name]()

    def mixed_writer(self) -> MixedWriter:
        """The writer of a mixed-precision folder."""
        return _MIXED[self.format_name]()

    def schemes(self, widths: Iterable[int]) -> list[Scheme | None]:
        """The schemes that a matrix of a mix may have, the fewest bits first; None is 16-bit
        floats."""
        base = self.scheme(widths)
        bits = sorted(set(self.mix_bits or MIX_BITS))
        return [None if each == _FLOAT_BITS else replace(base, bits=each) for each in bits]

    def scheme(self, widths: Iterable[int]) -> Scheme:
        """The scheme of matrices with these numbers of inputs."""
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
        # AWQ's files have zeros in any case, and its scales gain by them.
        has_zeros = "awq" in (self.method, self.format_name)
        symmetric = not has_zeros if self.symmetric is None else self.symmetric
        return Scheme(self.bits or 4, group_size, symmetric)
