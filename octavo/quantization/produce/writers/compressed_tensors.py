"""compressed-tensors, vLLM's own format: "pack-quantized" integers for 16-bit activations, and
"int-quantized" ones of 8 bits, "float-quantized" FP8, for activations of 8 bits.

    pack-quantized    weight_packed int32 [N, K * bits / 32]   codes, packed along K
                      weight_scale [N, groups]
                      weight_zero_point int32 [N * bits / 32, groups]   of asymmetric ones, along N
                      weight_shape int64 [2]
    int-quantized     weight int8 [N, K], weight_scale [N, 1]
    float-quantized   weight float8_e4m3 [N, K], weight_scale [N, 1]

Codes that are stored with an offset of 2^(bits - 1) are ours as they are. The versions up to 0.17
pack codes of 3, 5, 6 and 7 bits with gaps; this is the dense stream of the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.quantization.coded import CodedWeight
from octavo.quantization.produce.writers.base import (
    Kind,
    NewTensor,
    all_codes,
    need,
    need_whole_groups,
    table,
)
from octavo.quantization.produce.writers.bits import pack_words


class CompressedTensorsWriter:
    """Integers for activations of 16 bits."""

    name = "compressed-tensors"

    def check(self, name: str, shape: tuple[int, int], kind: Kind) -> None:
        need_whole_groups(name, "compressed-tensors", shape, kind)
        need(
            name, "compressed-tensors", kind.symmetric or shape[0] * kind.bits % 32 == 0,
            f"zeros of its {shape[0]} outputs fill no whole words",
        )  # fmt: skip

    def tensors(self, weight: CodedWeight, kind: Kind) -> Mapping[str, NewTensor]:
        made = {
            "weight_packed": NewTensor("I32", pack_words(all_codes(weight), kind.bits)),
            "weight_scale": NewTensor("F16", table(weight.scales, weight).astype(np.float16)),
            "weight_shape": NewTensor("I64", np.array(weight.shape, "<i8")),
        }
        if not kind.symmetric:
            zeros = table(weight.zeros, weight).astype(np.uint8)
            made["weight_zero_point"] = NewTensor("I32", pack_words(zeros.T, kind.bits).T)
        return made

    def config(self, kind: Kind, left_out: Sequence[str]) -> dict[str, Any]:
        weights = {
            "num_bits": kind.bits,
            "type": "int",
            "symmetric": kind.symmetric,
            "strategy": "channel" if kind.group_size is None else "group",
            "group_size": kind.group_size,
            "dynamic": False,
        }
        return _config("pack-quantized", weights, None, left_out)


class Int8Writer:
    """Integers of 8 bits, for activations of 8 bits with a scale for each token."""

    name = "compressed-tensors"

    def check(self, name: str, shape: tuple[int, int], kind: Kind) -> None:
        is_so = kind.bits == 8 and kind.symmetric and kind.group_size is None
        need(name, "W8A8", is_so, "it has 8 bits, symmetric, with a scale for each output")

    def tensors(self, weight: CodedWeight, kind: Kind) -> Mapping[str, NewTensor]:
        signed = (all_codes(weight) ^ 0x80).view(np.int8)  # less 128
        return {"weight": NewTensor("I8", signed), "weight_scale": _row_scales(weight)}

    def config(self, kind: Kind, left_out: Sequence[str]) -> dict[str, Any]:
        return _config("int-quantized", _of_rows("int"), _of_tokens("int"), left_out)


class FP8Writer:
    """FP8 (e4m3) with a scale for each output, for activations of FP8."""

    name = "compressed-tensors"

    def check(self, name: str, shape: tuple[int, int], kind: Kind) -> None:
        is_so = kind.bits == 8 and kind.group_size is None
        need(name, "FP8", is_so, "it has 8 bits, with a scale for each output")

    def tensors(self, weight: CodedWeight, kind: Kind) -> Mapping[str, NewTensor]:
        return {
            "weight": NewTensor("F8_E4M3", all_codes(weight)),
            "weight_scale": _row_scales(weight),
        }

    def config(self, kind: Kind, left_out: Sequence[str]) -> dict[str, Any]:
        return _config("float-quantized", _of_rows("float"), _of_tokens("float"), left_out)


def _row_scales(weight: CodedWeight) -> NewTensor:
    return NewTensor("F32", table(weight.scales, weight).astype("<f4"))


def _of_rows(type: str) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": type,
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }


def _of_tokens(type: str) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": type,
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }


def _config(
    format: str,
    weights: Mapping[str, Any],
    activations: Mapping[str, Any] | None,
    left_out: Sequence[str],
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": dict(weights),
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "version": "0.17.0",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": list(left_out),
        "kv_cache_scheme": None,
    }
