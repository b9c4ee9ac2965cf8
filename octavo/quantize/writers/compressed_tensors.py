"""The compressed-tensors format of vLLM, with packed integers, 8-bit integers and FP8.

"pack-quantized" integers are for 16-bit activations; "int-quantized" ones of 8 bits and
"float-quantized" FP8 are for 8-bit activations.

    pack-quantized    weight_packed int32 [N, K * bits / 32]   codes, packed along K
                      weight_scale [N, groups]
                      weight_zero_point int32 [N * bits / 32, groups]   if asymmetric, along N
                      weight_shape int64 [2]
    int-quantized     weight int8 [N, K], weight_scale [N, 1]
    float-quantized   weight float8_e4m3 [N, K], weight_scale [N, 1]

The stored codes have an offset of 2^(bits - 1), as ours. Versions up to 0.17 pack codes of 3, 5, 6
and 7 bits with gaps; this is the dense stream of later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.quantization.coded import CodedWeight
from octavo.quantize.scheme import Scheme
from octavo.quantize.writers.base import (
    WrittenPart,
    all_codes,
    group_size,
    need,
    table,
)
from octavo.quantize.writers.bits import pack_words


class CompressedTensorsWriter:
    """Integers for activations of 16 bits."""

    name = "compressed-tensors"

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        need("compressed-tensors", scheme.symmetric or shape[0] * scheme.bits % 32 == 0,
            f"zeros of its {shape[0]} outputs fill no whole words",
        )  # fmt: skip

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        made = {
            "weight_packed": WrittenPart("I32", pack_words(all_codes(weight), scheme.bits)),
            "weight_scale": WrittenPart("F16", table(weight.scales, weight).astype(np.float16)),
            "weight_shape": WrittenPart("I64", np.array(weight.shape, "<i8")),
        }
        if not scheme.symmetric:
            zeros = table(weight.zeros, weight).astype(np.uint8)
            made["weight_zero_point"] = WrittenPart("I32", pack_words(zeros.T, scheme.bits).T)
        return made

    def num_bits(self, shape: tuple[int, int], scheme: Scheme) -> int:
        num_outputs, num_inputs = shape
        num_groups = num_inputs // scheme.group_width(num_inputs)
        codes = num_outputs * _in_words(num_inputs * scheme.bits)
        zeros = 0 if scheme.symmetric else num_groups * _in_words(num_outputs * scheme.bits)
        return codes + num_outputs * num_groups * 16 + zeros + 2 * 64  # of the scales, the shape

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        return _config("pack-quantized", _of_groups(scheme), None, left_out)

    def mixed_config(
        self, schemes: Mapping[str, Scheme], left_out: Sequence[str]
    ) -> dict[str, Any]:
        """The config with a group for each scheme. Modules are named in full, since readers differ
        in how they match patterns."""
        distinct = sorted(set(schemes.values()), key=lambda scheme: scheme.bits)
        groups = [
            _group([name for name, each in schemes.items() if each == scheme], _of_groups(scheme))
            for scheme in distinct
        ]
        return _config_of(groups, "pack-quantized", left_out)


class Int8Writer:
    """Integers of 8 bits, for activations of 8 bits with a scale for each token."""

    name = "compressed-tensors"

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        is_so = scheme.bits == 8 and scheme.symmetric and group_size(scheme) is None
        need("W8A8", is_so, "it has 8 bits, symmetric, with a scale for each output")

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        signed = (all_codes(weight) ^ 0x80).view(np.int8)  # less 128
        return {"weight": WrittenPart("I8", signed), "weight_scale": _row_scales(weight)}

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        return _config("int-quantized", _of_rows("int"), _of_tokens("int"), left_out)


class FP8Writer:
    """FP8 (e4m3) with a scale for each output, for activations of FP8."""

    name = "compressed-tensors"

    def check(self, shape: tuple[int, int], scheme: Scheme) -> None:
        is_so = scheme.bits == 8 and group_size(scheme) is None
        need("FP8", is_so, "it has 8 bits, with a scale for each output")

    def parts(self, weight: CodedWeight, scheme: Scheme) -> Mapping[str, WrittenPart]:
        return {
            "weight": WrittenPart("F8_E4M3", all_codes(weight)),
            "weight_scale": _row_scales(weight),
        }

    def config(self, scheme: Scheme, left_out: Sequence[str]) -> dict[str, Any]:
        return _config("float-quantized", _of_rows("float"), _of_tokens("float"), left_out)


def _of_groups(scheme: Scheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if group_size(scheme) is None else "group",
        "group_size": group_size(scheme),
        "dynamic": False,
    }


def _in_words(num_bits: int) -> int:
    return num_bits + -num_bits % 32


def _row_scales(weight: CodedWeight) -> WrittenPart:
    return WrittenPart("F32", table(weight.scales, weight).astype("<f4"))


def _of_rows(type: str) -> dict[str, Any]:
    common = {"num_bits": 8, "type": type, "symmetric": True}
    return {**common, "strategy": "channel", "dynamic": False}


def _of_tokens(type: str) -> dict[str, Any]:
    return {**_of_rows(type), "strategy": "token", "dynamic": True}


def _config(
    format: str,
    weights: Mapping[str, Any],
    activations: Mapping[str, Any] | None,
    left_out: Sequence[str],
) -> dict[str, Any]:
    return _config_of([_group(["Linear"], weights, activations)], format, left_out)


def _group(
    targets: Sequence[str],
    weights: Mapping[str, Any],
    activations: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "targets": list(targets),
        "weights": dict(weights),
        "input_activations": activations,
        "output_activations": None,
    }


def _config_of(
    groups: Sequence[Mapping[str, Any]], format: str, left_out: Sequence[str]
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "version": "0.18.0",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(left_out),
        "kv_cache_scheme": None,
    }
