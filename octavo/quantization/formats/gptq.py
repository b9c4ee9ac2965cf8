"""GPTQ, as AutoGPTQ and GPTQModel write it: codes in words along the inputs.

::

    qweight  int32 [K * bits / 32, N]        a column of words is the stream of one output
    qzeros   int32 [groups, N * bits / 32]   a row is a stream too
    scales   float [groups, N]
    g_idx    int32 [K]                       the group of each input; optional

    value = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])

``checkpoint_format`` says how zeros are stored: as they are in ``gptq_v2``, minus one in ``gptq``
(v1). Paper: arXiv 2210.17323. Layout: AutoGPTQ 0.7 ``qlinear_cuda.py``, GPTQModel 2.2
``utils/model.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.base.linear_regex import Pattern, PatternCompiler, PatternError
from octavo.quantization.coded import CodedWeight
from octavo.quantization.formats.codes import ColumnStreams, as_bytes, unpack_stream
from octavo.quantization.formats.grid import ceil_div, one_or_all
from octavo.quantization.formats.module_patterns import pattern_of
from octavo.quantization.formats.stored import FLOATS, Parts, StoredTensor

_PARTS = ("qweight", "qzeros", "scales", "g_idx")

# Numbers that writers subtract from the words of zeros. For 3 bits GPTQModel subtracts these from
# each three words, which is a one for every value only if the words are taken in reverse.
_ONES = {
    2: [0x55555555],
    3: [0x24924924, 0x92492492, 0x49249249],
    4: [0x11111111],
    8: [0x01010101],
}


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings of one weight. ``group_size`` is None where a row is one group."""

    bits: int
    group_size: int | None
    symmetric: bool

    @classmethod
    def read(cls, fields: Fields) -> _Settings:
        bits = fields.integer("bits")
        if bits not in _ONES:
            raise UnsupportedModelError(
                f"{fields.path}: GPTQ of {bits} bits is not supported, but "
                f"{', '.join(map(str, _ONES))} are"
            )
        group_size = fields.integer("group_size", -1, minimum=-1)
        if group_size == 0:
            raise fields.error("group_size", "0 is neither a size nor -1")
        return cls(bits, None if group_size < 0 else group_size, fields.boolean("sym", True))


class GPTQ:
    """Reader of GPTQ weights, see the module and ``WeightFormat``."""

    name = "gptq"

    def __init__(self, fields: Fields):
        self._settings = _Settings.read(fields)
        self._dynamic = _dynamic_settings(fields)
        layout = fields.text("checkpoint_format", None) or fields.text("format", "gptq")
        if layout not in ("gptq", "gptq_v2") or fields.raw("is_marlin_format"):
            raise UnsupportedModelError(
                f"{fields.path}: the weights are laid out for special kernels (Marlin, or the "
                f"format {layout!r:.80}); use a GPTQ checkpoint in the layout gptq or gptq_v2"
            )
        self._has_true_zeros = layout == "gptq_v2"
        self._is_by_gptqmodel = _is_by_gptqmodel(fields)

    def part(self, tensor_name: str) -> tuple[str, str] | None:
        module, _, part = tensor_name.rpartition(".")
        return (f"{module}.weight", part) if part in _PARTS else None

    def assemble(self, name: str, parts: Mapping[str, StoredTensor]) -> CodedWeight:
        return _assemble(self, Parts(name, parts))

    def settings_of(self, module: str) -> _Settings:
        """The settings of a module, which ``dynamic`` may override."""
        matches = (settings for pattern, settings in self._dynamic if pattern.match(module))
        return next(matches, self._settings)

    def zeros_of(self, words: np.ndarray, bits: int, count: int) -> np.ndarray:
        """True zeros from stored streams: uint32 [groups, W] to uint8 [groups, count].

        Writers of v1 subtract from whole words, where a zero of 0 borrows from the next one. So
        adding to whole words, modulo 2 ** 32, restores every zero. AutoGPTQ, which has no zeros of
        0, subtracts before it packs: the same, except for values that are split over two words.
        """
        if self._has_true_zeros:
            return unpack_stream(as_bytes(words), bits, count)
        if bits == 3 and not self._is_by_gptqmodel:
            return (unpack_stream(as_bytes(words), bits, count) + np.uint8(1)) & np.uint8(7)
        ones = np.resize(np.array(_ONES[bits], dtype=np.uint32), words.shape[1])
        return unpack_stream(as_bytes(words + ones), bits, count)


def _dynamic_settings(fields: Fields) -> list[tuple[Pattern, _Settings]]:
    """GPTQModel's settings for single modules: patterns of names, with the settings that differ
    there.

    Patterns that begin with ``-:`` name modules that are not quantized; they have plain weights
    anyway.
    """
    found = []
    compiler = PatternCompiler()
    section = fields.section("dynamic", {})
    for key in section:
        if key.startswith("-:"):
            continue
        changed = {**_as_given(fields), **section.table(key)}
        pattern = pattern_of(section, key, key.removeprefix("+:"), compiler)
        found.append((pattern, _Settings.read(Fields(fields.path, changed))))
    return found


def _as_given(fields: Fields) -> dict[str, Any]:
    return {name: fields.raw(name) for name in ("bits", "group_size", "sym") if name in fields}


def _is_by_gptqmodel(fields: Fields) -> bool:
    writers = fields.section("meta", {}).raw("quantizer", [])
    writers = [writers] if isinstance(writers, str) else writers
    return isinstance(writers, list) and any(str(w).startswith("gptqmodel") for w in writers)


def _assemble(format: GPTQ, parts: Parts) -> CodedWeight:
    try:
        settings = format.settings_of(parts.name.removesuffix(".weight"))
    except PatternError as error:
        raise parts.error(f"its name: {error}") from None
    bits = settings.bits
    qweight = parts.need("qweight", "I32", dims=2)
    num_outputs = qweight.shape[1]
    num_inputs = _num_inputs(parts, qweight, bits)
    group_size = settings.group_size or num_inputs
    num_groups = ceil_div(num_inputs, group_size)
    scales = parts.need("scales", *FLOATS).shaped(num_groups, num_outputs)
    return CodedWeight(
        format=format.name,
        shape=(num_outputs, num_inputs),
        bits=bits,
        group_size=group_size,
        codes=ColumnStreams(qweight.words(), bits, num_inputs),
        scales=np.ascontiguousarray(scales.floats().T),
        zeros=_zeros(format, parts, settings, num_groups, num_outputs),
        groups=_groups(parts, num_inputs, num_groups, group_size),
        nbytes=parts.nbytes,
    )


def _num_inputs(parts: Parts, qweight: StoredTensor, bits: int) -> int:
    g_idx = parts.find("g_idx")
    num_words = qweight.shape[0]
    if g_idx is None or g_idx.shape == (0,):
        num_inputs = num_words * 32 // bits
    else:
        num_inputs = g_idx.of("I32", "I64", dims=1).shape[0]
    if not num_inputs or num_words != ceil_div(num_inputs * bits, 32):
        raise qweight.error(
            f"{num_words} words of {bits} bits a code are not those of {num_inputs} inputs"
        )
    return num_inputs


def _zeros(
    format: GPTQ, parts: Parts, settings: _Settings, num_groups: int, num_outputs: int
) -> np.ndarray | float:
    """Zeros in float32 [N, groups], or one number for all."""
    bits = settings.bits
    qzeros = parts.need("qzeros", "I32").shaped(num_groups, ceil_div(num_outputs * bits, 32))
    middle = 1 << (bits - 1)
    if settings.symmetric:
        stored = unpack_stream(as_bytes(qzeros.words()), bits, num_outputs)
        if (stored == middle).all():  # true zeros, whatever the config says or leaves out
            return float(middle)
    zeros = format.zeros_of(qzeros.words(), bits, num_outputs)
    return one_or_all(np.ascontiguousarray(zeros.T, dtype=np.float32))


def _groups(parts: Parts, num_inputs: int, num_groups: int, group_size: int) -> np.ndarray | None:
    g_idx = parts.find("g_idx")
    if g_idx is None or g_idx.shape == (0,):
        return None
    groups = g_idx.array()
    if groups.min() < 0 or groups.max() >= num_groups:
        raise g_idx.error(
            f"groups {groups.min()} to {groups.max()}, where there are only 0 to {num_groups - 1}"
        )
    # A g_idx that was never filled in has only zeros.
    if not groups.any() or np.array_equal(groups, np.arange(num_inputs) // group_size):
        return None
    return groups.astype(np.int32)
