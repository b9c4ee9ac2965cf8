"""What the ``quantization_config`` of a model says of its weights, without reading them.

Wider than ``octavo.quantization.formats``, which reads weights: only types and names are needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from octavo.cost.model_spec import ModelSpec
from octavo.cost.rank_model import Arithmetic
from octavo.cost.weight_rules import Recipe
from octavo.cost.weight_type import QUANTIZED, WeightType
from octavo.errors import UnsupportedModelError
from octavo.fields import Fields

_IGNORED = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")


def read(spec: ModelSpec, floats: WeightType) -> Recipe:
    """What is quantized, and how. ModelFileError for fields that make no sense,
    UnsupportedModelError for a method that is not known."""
    fields = Fields(spec.source or Path(spec.name), spec.quantization or {})
    method = fields.text("quant_method", "").lower()
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{spec.name}: quantization with {method!r:.80} is not one of {', '.join(_METHODS)}"
        )
    ignored = next((fields.texts(name) for name in _IGNORED if name in fields), [])
    return Recipe.usual(_METHODS[method](fields), floats, tuple(map(_pattern, ignored)))


def _pattern(name: str) -> str:
    """A regular expression for the modules that a config names: itself, or all below it."""
    if name.startswith("re:"):
        return f"^(?:{name[3:]})"
    plain = ".*".join(map(re.escape, name.split("*")))
    return rf"(?:^|\.){plain}(?:\.|$)"


def _fp8(fields: Fields) -> WeightType:
    if "weight_block_size" not in fields:
        return QUANTIZED["fp8"]
    outputs, inputs = fields.each("weight_block_size", Fields.integer, 2)
    return replace(QUANTIZED["fp8-block"], block_outputs=outputs, block_inputs=inputs)


def _grouped(fields: Fields) -> WeightType:
    """GPTQ and AWQ: a scale of 16 bits and a zero point; a group of -1 is all inputs."""
    bits = fields.integer("bits", 4)
    group = max(0, fields.integer("group_size", 128, minimum=-1))
    return WeightType(f"int{bits}-g{group}", bits, "fp16", 2 + bits / 8, 1, group)


def _compressed_tensors(fields: Fields) -> WeightType:
    groups = fields.table("config_groups")
    group = Fields(fields.path, next(iter(groups.values()), {}))
    weights = group.section("weights")
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    if kind == "float" and bits == 4:
        return QUANTIZED["nvfp4"]
    arithmetic: Arithmetic = "fp16"
    if bits == 8 and group.raw("input_activations") is not None:
        arithmetic = "fp8" if kind == "float" else "int8"
    strategy = weights.text("strategy", "channel")
    outputs, inputs = 0 if strategy == "tensor" else 1, 0
    if strategy == "block":
        outputs, inputs = weights.each("block_structure", Fields.integer, 2)
    elif strategy == "group":
        inputs = weights.integer("group_size")
    name = f"{'fp' if kind == 'float' else 'int'}{bits}" + (f"-g{inputs}" if inputs else "")
    return WeightType(name, bits, arithmetic, 2.0, outputs, inputs)


def _mxfp4(fields: Fields) -> WeightType:
    return QUANTIZED["mxfp4"]


def _bitsandbytes(fields: Fields) -> WeightType:
    if fields.boolean("load_in_8bit", False):
        return QUANTIZED["int8"]
    if not fields.boolean("bnb_4bit_use_double_quant", False):
        return QUANTIZED["nf4"]
    # Scales of scales: a byte for 64 numbers, and a float32 for 256 of these.
    return replace(QUANTIZED["nf4"], scale_bytes=1 + 4 / 256)


def _modelopt(fields: Fields) -> WeightType:
    is_fp4 = "FP4" in fields.text("quant_algo", "FP8").upper()
    return QUANTIZED["nvfp4" if is_fp4 else "fp8"]


_METHODS: dict[str, Callable[[Fields], WeightType]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "gptq": _grouped,
    "awq": _grouped,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
}
