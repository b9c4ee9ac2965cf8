"""compressed-tensors, as llm-compressor writes it: a family of layouts for many schemes.

::

    weight_packed        int32 [N, words]       integers + 2 ** (bits - 1), in words along K
                         uint8 [N, K / 2]       FP4 (E2M1), the first of two in the lower half
    weight               int8 or float8_e4m3fn [N, K]
    weight_shape         int [2]                (N, K), of packed integers
    weight_scale         a number for all, or for each row, group or tile of the matrix; U8 is E8M0
    weight_zero_point    int8 as the scales, or int32 [words, groups] packed along N
    weight_global_scale  F32, which the scales of FP4 are divided by (NVFP4)
    weight_g_idx         int32 [K], the group of each input; of versions up to 0.17

    value = weight_scale * (q - weight_zero_point)

The tensors that a weight has decide how it is read. The config's groups have the number of bits,
the shape of scale groups, and the target modules. Versions up to 0.17 put ``32 // bits`` integers
in a word, those from 0.18 on have no gaps, and the width of a row tells which.

``input_activations`` of a config group describes the activations that its weights are made for
(null: unquantized); only whether they have 8 bits is read. ``input_scale`` of static ones is not
read: octavo rounds activations with a scale for each row, which clips nothing.

Sources: compressed-tensors 0.12 and 0.20, ``compressors/``; OCP Microscaling Formats 1.0 for MXFP4
and MXFP8.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.base.linear_regex import Pattern, PatternCompiler, PatternError
from octavo.quantization.coded import CodedWeight, Codes
from octavo.quantization.formats.codes import (
    ByteCodes,
    RowStreams,
    RowWords,
    as_bytes,
    unpack_stream,
    unpack_words,
)
from octavo.quantization.formats.fp8 import float8
from octavo.quantization.formats.grid import ceil_div, of_blocks, one_or_all
from octavo.quantization.formats.module_patterns import pattern_of
from octavo.quantization.formats.stored import FLOAT8, FLOATS, Parts, StoredTensor
from octavo.quantization.levels import E2M1

_PARTS = (
    *("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point"),
    *("weight_global_scale", "weight_g_idx"),
)
_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"),
    *("mixed-precision", "dense"),
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Quantization settings of some modules: one group of the config."""

    targets: tuple[_Target, ...]
    bits: int
    strategy: str
    block: tuple[int, int]  # of "group", "tensor_group" and "block"
    symmetric: bool
    is_old: bool  # written by a version that packs with gaps
    rounds_activations: bool  # to 8 bits

    @classmethod
    def read(cls, fields: Fields, is_old: bool, compiler: PatternCompiler) -> _Scheme:
        weights = fields.section("weights")
        strategy, block = _strategy(weights)
        return cls(
            targets=_targets(fields, "targets", compiler),
            bits=weights.integer("num_bits", 8, maximum=64),
            strategy=strategy,
            block=block,
            symmetric=weights.boolean("symmetric", True),
            is_old=is_old,
            rounds_activations=_rounds_activations(fields),
        )

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a block of the matrix that shares a scale."""
        if self.strategy == "tensor":
            return shape
        return (1, shape[1]) if self.strategy == "channel" else self.block


def _strategy(weights: Fields) -> tuple[str, tuple[int, int]]:
    """The strategy, which old configs only imply, and its block."""
    group_size = weights.integer("group_size", None, minimum=-1)
    implied = "tensor" if group_size is None else "channel" if group_size < 0 else "group"
    strategy = weights.text("strategy", implied)
    if strategy not in _STRATEGIES:
        raise UnsupportedModelError(
            f"{weights.path}: weights quantized by {strategy!r:.80} are not supported, but by "
            f"{', '.join(_STRATEGIES)} they are"
        )
    if strategy == "block":
        rows, columns = weights.each("block_structure", Fields.integer, 2)
        return strategy, (rows, columns)
    if strategy in ("group", "tensor_group"):
        return strategy, (1, weights.integer("group_size"))
    return strategy, (1, 1)


def _rounds_activations(fields: Fields) -> bool:
    if "input_activations" not in fields:
        return False
    num_bits: int = fields.section("input_activations").integer("num_bits", 8, maximum=64)
    return num_bits == 8


class CompressedTensors:
    """Reader of compressed-tensors weights, see the module and ``WeightFormat``."""

    name = "compressed-tensors"

    def __init__(self, fields: Fields):
        _refuse_what_is_no_weight_format(fields)
        _check_format(fields)
        groups = fields.section("config_groups", {})
        is_old = _is_old(fields)
        self._schemes = []
        compiler = PatternCompiler()
        for name in fields.table("config_groups", {}):
            section = _section(groups, name)
            _check_format(section)
            if "weights" in section:
                self._schemes.append(_Scheme.read(section, is_old, compiler))
        self._ignored = _targets(fields, "ignore", compiler) if "ignore" in fields else ()

    def part(self, tensor_name: str) -> tuple[str, str] | None:
        module, _, part = tensor_name.rpartition(".")
        return (f"{module}.weight", part) if part in _PARTS else None

    def assemble(self, name: str, parts: Mapping[str, StoredTensor]) -> CodedWeight:
        tensors = Parts(name, parts)
        module = name.removesuffix(".weight")
        try:
            scheme = self._scheme(module)
        except PatternError as error:
            raise tensors.error(f"its name: {error}") from None
        if scheme is None:
            raise tensors.error(
                "the weight is quantized, but no group of the config targets it, or the config "
                "ignores it"
            )
        return _reader(tensors)(tensors, scheme)

    def _scheme(self, module: str) -> _Scheme | None:
        """The scheme that names a module most exactly, of those that have it as a target."""
        if any(_names(target, module) or _is_class(target, module) for target in self._ignored):
            return None
        for matches in (operator.eq, _names, _is_class):
            for scheme in self._schemes:
                if any(matches(target, module) for target in scheme.targets):
                    return scheme
        return None


def _is_old(fields: Fields) -> bool:
    """True if a version before 0.18 wrote it; a config that names no version is newer."""
    version = re.match(r"(\d{1,9})\.(\d{1,9})", fields.text("version", ""))
    return version is not None and (int(version[1]), int(version[2])) < (0, 18)


def _section(groups: Fields, name: str) -> Fields:
    if isinstance(groups.raw(name), list):
        raise UnsupportedModelError(
            f"{groups.path}: the config group {name!r:.80} is only the name of a preset; save the "
            "model again, so that the config lists its settings"
        )
    return groups.section(name)


def _check_format(fields: Fields) -> None:
    layout = fields.text("format", "dense")
    if layout not in _FORMATS:
        raise UnsupportedModelError(
            f"{fields.path}: compressed-tensors in the format {layout!r:.80} are not supported, "
            f"but {', '.join(_FORMATS)} are"
        )


def _refuse_what_is_no_weight_format(fields: Fields) -> None:
    """Refuse sparsity and transforms, which the same config may ask for."""
    sparsity = fields.section("sparsity_config", {}).text("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModelError(
            f"{fields.path}: sparse weights in the format {sparsity!r:.80} are not supported"
        )
    if fields.section("transform_config", {}).raw("config_groups"):
        raise UnsupportedModelError(
            f"{fields.path}: the transform_config asks for rotations of activations at every step, "
            "which octavo does not support"
        )


_Target = str | Pattern  # a module's name, or that of its class; or a pattern of names


def _targets(fields: Fields, name: str, compiler: PatternCompiler) -> tuple[_Target, ...]:
    """Names of modules and of classes, and patterns of names, which begin with ``re:``."""
    found: list[_Target] = []
    for target in fields.each(name, Fields.text):
        if target.startswith("re:"):
            found.append(pattern_of(fields, name, target.removeprefix("re:"), compiler))
        else:
            found.append(target)
    return tuple(found)


def _names(target: _Target, module: str) -> bool:
    return target.match(module) if isinstance(target, Pattern) else target == module


def _is_class(target: _Target, module: str) -> bool:
    """True if a module is of the class ``target``: all quantized modules but the embedding are
    Linear."""
    return target == ("Embedding" if module.endswith("embed_tokens") else "Linear")


def _reader(parts: Parts) -> Callable[[Parts, _Scheme], CodedWeight]:
    """The function that reads the layout of these parts."""
    packed = parts.find("weight_packed")
    if packed is not None:
        is_integer = packed.of("I32", "U8", dims=2).dtype == "I32"
        return _packed_integers if is_integer else _float4
    is_integer = parts.need("weight", "I8", *FLOAT8, dims=2).dtype == "I8"
    return _integers if is_integer else _float8


def _packed_integers(parts: Parts, scheme: _Scheme) -> CodedWeight:
    packed = parts.need("weight_packed", "I32", dims=2)
    shape = _shape(parts, packed)
    bits = scheme.bits
    if not 2 <= bits <= 8:
        raise UnsupportedModelError(
            f"{packed.path} ({packed.name}): integers of {bits} bits are not supported, but of 2 "
            "to 8 are"
        )
    has_gaps = _has_gaps(packed, shape[1], scheme)
    codes: Codes
    if has_gaps:
        codes = RowWords(packed.words(), bits, shape[1])
    else:
        codes = RowStreams(packed.bytes.reshape(shape[0], -1), bits, shape[1])
    return _coded_integers(parts, scheme, shape, bits, codes, has_gaps)


def _integers(parts: Parts, scheme: _Scheme) -> CodedWeight:
    """Read int8 codes, whatever ``num_bits`` says: files need not keep to it."""
    weight = parts.need("weight", "I8", dims=2)
    shape = weight.shape[0], weight.shape[1]
    codes = ByteCodes(weight.bytes.reshape(shape), flip=128)
    return _coded_integers(parts, scheme, shape, 8, codes, has_gaps=False)


def _coded_integers(
    parts: Parts, scheme: _Scheme, shape: tuple[int, int], bits: int, codes: Codes, has_gaps: bool
) -> CodedWeight:
    block = scheme.block_of(shape)
    return CodedWeight(
        format=CompressedTensors.name,
        shape=shape,
        bits=bits,
        group_size=block[1],
        codes=codes,
        scales=of_blocks(parts.need("weight_scale", *FLOATS), shape, block),
        zeros=_zeros(parts, scheme, shape, bits, has_gaps),
        groups=_groups(parts, shape[1], block[1]),
        nbytes=parts.nbytes,
        rounds_activations=scheme.rounds_activations,
    )


def _float8(parts: Parts, scheme: _Scheme) -> CodedWeight:
    weight = parts.need("weight", *FLOAT8, dims=2)
    _refuse_zeros(parts)
    block = scheme.block_of((weight.shape[0], weight.shape[1]))
    scale, rounds = _float_scale(parts), scheme.rounds_activations
    return float8(CompressedTensors.name, parts, weight, scale, block, rounds)


def _float4(parts: Parts, scheme: _Scheme) -> CodedWeight:
    """Read MXFP4, or NVFP4 if there is a global scale."""
    packed = parts.need("weight_packed", "U8", dims=2)
    _refuse_zeros(parts)
    shape = packed.shape[0], 2 * packed.shape[1]
    block = scheme.block_of(shape)
    scales = of_blocks(_float_scale(parts), shape, block)
    whole = parts.find("weight_global_scale")
    if whole is not None:
        scales = scales / _divisor(whole, shape)
    return CodedWeight(
        format=CompressedTensors.name,
        shape=shape,
        bits=4,
        group_size=block[1],
        codes=RowStreams(packed.bytes.reshape(packed.shape), 4, shape[1]),
        scales=scales,
        zeros=0.0,
        levels=E2M1,
        nbytes=parts.nbytes,
    )


def _divisor(whole: StoredTensor, shape: tuple[int, int]) -> np.ndarray:
    """The global scale: float32 [1, 1]."""
    number = of_blocks(whole.of(*FLOATS), shape, shape)
    if not np.finfo(np.float32).tiny <= number.item() < np.inf:
        raise whole.error(f"{number.item()} is not a number to divide by")
    return number


def _float_scale(parts: Parts) -> StoredTensor:
    """The scale, whose bytes are exponents (E8M0)."""
    scale = parts.need("weight_scale", *FLOATS, "F8_E4M3", "F8_E8M0", "U8")
    return replace(scale, dtype="F8_E8M0") if scale.dtype == "U8" else scale


def _refuse_zeros(parts: Parts) -> None:
    zeros = parts.find("weight_zero_point")
    if zeros is not None and zeros.bytes.any():
        raise UnsupportedModelError(
            f"{zeros.path} ({zeros.name}): floats with zero points are not supported"
        )


def _shape(parts: Parts, packed: StoredTensor) -> tuple[int, int]:
    """Shape (N, K) from ``weight_shape``."""
    stored = parts.need("weight_shape", "I32", "I64").shaped(2)
    num_outputs, num_inputs = stored.array().tolist()
    if min(num_outputs, num_inputs) < 1 or num_outputs != packed.shape[0]:
        raise stored.error(f"{[num_outputs, num_inputs]} is not the shape of weight_packed")
    return num_outputs, num_inputs


def _has_gaps(packed: StoredTensor, num_inputs: int, scheme: _Scheme) -> bool:
    """True if words hold ``32 // bits`` integers each, false if they are a stream.

    Some rows that are not whole words are as wide either way; then the version decides.
    """
    num_words, bits = packed.shape[1], scheme.bits
    as_stream, with_gaps = ceil_div(num_inputs * bits, 32), ceil_div(num_inputs, 32 // bits)
    if num_words not in (as_stream, with_gaps):
        raise packed.error(
            f"rows of {num_words} words are not those of {num_inputs} integers of {bits} bits"
        )
    return scheme.is_old if as_stream == with_gaps else num_words == with_gaps


def _zeros(
    parts: Parts, scheme: _Scheme, shape: tuple[int, int], bits: int, has_gaps: bool
) -> np.ndarray | float:
    """Zero points as codes: a zero point of 0 is 2 ** (bits - 1)."""
    middle = 1 << (bits - 1)
    if scheme.symmetric and "weight_zero_point" not in parts:
        return float(middle)
    stored = parts.need("weight_zero_point", "I8", "I32")
    block = scheme.block_of(shape)
    if stored.dtype == "I8":
        return one_or_all(of_blocks(stored, shape, block) + np.float32(middle))
    num_outputs, num_groups = shape[0], ceil_div(shape[1], block[1])
    num_words = ceil_div(num_outputs, 32 // bits) if has_gaps else ceil_div(num_outputs * bits, 32)
    words = stored.shaped(num_words, num_groups).words().T
    if has_gaps:
        fields = unpack_words(words, bits, num_outputs)
    else:
        fields = unpack_stream(as_bytes(words), bits, num_outputs)
    return one_or_all(np.ascontiguousarray(fields.T, dtype=np.float32))


def _groups(parts: Parts, num_inputs: int, group_size: int) -> np.ndarray | None:
    stored = parts.find("weight_g_idx")
    if stored is None:
        return None
    groups = stored.of("I32", "I64").shaped(num_inputs).array()
    if (groups == -1).all():  # never filled in: groups are consecutive
        return None
    last = ceil_div(num_inputs, group_size) - 1
    if groups.min() < 0 or groups.max() > last:
        raise stored.error(
            f"groups {groups.min()} to {groups.max()}, where there are only 0 to {last}"
        )
    if np.array_equal(groups, np.arange(num_inputs) // group_size):
        return None
    return groups.astype(np.int32)
