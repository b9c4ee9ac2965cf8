"""How many bytes each weight and each cached token takes, and what products are computed in.

A quantization never treats all tensors alike: embeddings and heads mostly stay as they were, norms
and routers always. So a ``Precision`` is asked for each weight. It comes from a name (``fp8``,
``int4-g32``, ``Q4_K_M``), from the ``quantization_config`` of a model, or from the tables of its
files, which have the last word.

Bits of a weight, with scales: int4 with groups of 128 has 4 + 16/128, with zero points 4/128 more
(GPTQ, AWQ); mxfp4 4 + 8/32; nvfp4 4 + 8/16; fp8 8 and a scale for each output, or for 128 x 128.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from octavo.cost.kv_type import KvType, kv_type
from octavo.cost.mixers import Attention
from octavo.cost.model_spec import ModelSpec
from octavo.cost.rank_model import Arithmetic
from octavo.cost.weight_shape import Part, WeightShape
from octavo.errors import ConfigError
from octavo.fields import Fields


class WeightType(Protocol):
    """How the numbers of a matrix are kept."""

    @property
    def name(self) -> str: ...
    @property
    def arithmetic(self) -> Arithmetic: ...

    def num_bytes(self, outputs: int, inputs: int) -> float:
        """Of a matrix; a vector has 0 inputs."""
        ...


@dataclass(frozen=True, slots=True)
class Codes:
    """Numbers of some bits, and scales for blocks of them.

    Args:
        scale_bytes: of what each block has beside its numbers, zero points included.
        block_outputs, block_inputs: numbers in a block; 0 is all of them.
    """

    name: str
    bits: float
    arithmetic: Arithmetic
    scale_bytes: float = 0.0
    block_outputs: int = 1
    block_inputs: int = 0

    def num_bytes(self, outputs: int, inputs: int) -> float:
        blocks = ceil(outputs / (self.block_outputs or outputs)) * ceil(
            inputs / (self.block_inputs or inputs or 1)
        )
        return outputs * max(1, inputs) * self.bits / 8 + blocks * self.scale_bytes


FLOATS = {
    "float32": Codes("float32", 32, "fp32"),
    "float16": Codes("float16", 16, "fp16"),
    "bfloat16": Codes("bfloat16", 16, "fp16"),
}
_FLOAT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def _int4(group: int, name: str = "") -> Codes:
    """A scale of 16 bits and a zero point of 4."""
    return Codes(name or f"int4-g{group}", 4, "fp16", 2.5, 1, group)


_CODES = {
    "fp8": Codes("fp8", 8, "fp8", 4.0),
    "fp8-block": Codes("fp8-block", 8, "fp8", 4.0, 128, 128),
    "int8": Codes("int8", 8, "int8", 4.0),
    "int4": _int4(128, "int4"),
    "gptq": _int4(128, "gptq"),
    "awq": _int4(128, "awq"),
    "nvfp4": Codes("nvfp4", 4, "fp4", 1.0, 1, 16),
    "mxfp4": Codes("mxfp4", 4, "fp16", 1.0, 1, 32),
    "nf4": Codes("nf4", 4, "fp16", 4.0, 1, 64),
}
_GROUPED = re.compile(r"(?:int4|gptq|awq|w4a16)-?g(\d+)")
_ALIASES = {"w8a8": "int8", "w4a16": "int4", "fp4": "nvfp4", "bitsandbytes": "nf4"}

# What is quantized where nothing else is said.
_LINEAR: tuple[Part, ...] = ("attention", "mlp", "experts")


# -- which weight has which type ------------------------------------------------------------------


class Rule(Protocol):
    """Which weight has which type."""

    def type_of(self, weight: WeightShape) -> WeightType: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """All have one."""

    type: WeightType

    def type_of(self, weight: WeightShape) -> WeightType:
        return self.type


@dataclass(frozen=True, slots=True)
class Recipe:
    """Matrices of some parts are quantized, but for those whose names match what is ignored."""

    quantized: WeightType
    floats: WeightType
    parts: tuple[Part, ...] = _LINEAR
    ignored: tuple[str, ...] = ()

    def type_of(self, weight: WeightShape) -> WeightType:
        is_matrix = weight.inputs > 0 and weight.part in self.parts
        return self.quantized if is_matrix and not self._is_ignored(weight) else self.floats

    def _is_ignored(self, weight: WeightShape) -> bool:
        return any(re.search(pattern, weight.full_name) for pattern in self.ignored)


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights and cached tokens take.

    Args:
        name: as it is asked for, or as results call it.
        kv: of cached keys and values.
        rule: which weight has which type.
        activation_bytes: of one number between matrix products.
    """

    name: str
    kv: KvType
    rule: Rule
    activation_bytes: float = 2.0

    def type_of(self, weight: WeightShape) -> WeightType:
        return self.rule.type_of(weight)

    def num_bytes(self, weight: WeightShape, share: WeightShape | None = None) -> float:
        """Of a weight, or of the ``share`` of it that one device has."""
        part = share or weight
        return part.experts * self.type_of(weight).num_bytes(part.outputs, part.inputs)


def precision_of(
    spec: ModelSpec,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    dtype: str | None = None,
) -> Precision:
    """How a model's numbers are kept.

    Args:
        quantization: a name of ``quantizations()``; None is what the model's files or its config
            say, and where they say nothing the floats of ``dtype``.
        kv_cache_dtype: see ``kv_type``; None is as wide as activations.
        dtype: of what is not quantized; None is that of the config.

    Raises:
        ConfigError: a name is not known; the message has the nearest.
        ModelFileError: the model's ``quantization_config`` makes no sense.
    """
    floats = _floats(dtype or spec.dtype)
    width = floats.bits / 8
    kv = kv_type(kv_cache_dtype or ("float32" if width == 4 else "bfloat16"))
    if quantization is not None:
        name, rule = quantization, _rule_by_name(spec, quantization, floats)
    elif spec.source is not None:
        name, rule = "as stored", _rule_of_files(spec, floats)
    elif spec.quantization:
        name, rule = _rule_of_config(spec, floats)
    else:
        name, rule = floats.name, Uniform(floats)
    return Precision(name, kv, rule, width)


def quantizations() -> list[str]:
    """Names that ``precision_of`` knows; ``int4-gN`` has groups of N."""
    from octavo.quantization.gguf_mixes import MIXES

    return [*FLOATS, *_CODES, "int4-g32", *MIXES]


def _floats(name: str) -> Codes:
    name = _FLOAT_NAMES.get(name, name)
    if name not in FLOATS:
        raise ConfigError(f"dtype {name!r:.80} is not one of {', '.join(FLOATS)}")
    return FLOATS[name]


def _rule_by_name(spec: ModelSpec, name: str, floats: Codes) -> Rule:
    from octavo.quantization.gguf_mixes import MIXES

    low = name.lower().replace("_", "-")
    low = _ALIASES.get(low, low)
    if low in FLOATS or low in _FLOAT_NAMES:
        return Uniform(_floats(low))
    if grouped := _GROUPED.fullmatch(low):
        return Recipe(_int4(int(grouped[1])), floats)
    if low in _CODES:
        return Recipe(_CODES[low], floats, ("experts",) if low == "mxfp4" else _LINEAR)
    target = name.upper().replace("-", "_")
    if target in MIXES:
        return GgufMix.of(spec, target)
    near = get_close_matches(low, [each.lower() for each in quantizations()], 3)
    known = " or ".join(near) or ", ".join(quantizations())
    raise ConfigError(f"quantization {name!r:.80} is not known: do you mean {known}?")


def _rule_of_files(spec: ModelSpec, floats: Codes) -> Rule:
    from octavo.cost.stored import stored_rule

    if not spec.quantization:
        return stored_rule(spec)
    _, rule = _rule_of_config(spec, floats)
    return stored_rule(spec, rule.quantized.arithmetic)


# -- quantization_config --------------------------------------------------------------------------


def _rule_of_config(spec: ModelSpec, floats: Codes) -> tuple[str, Recipe]:
    fields = Fields(Path(spec.name), spec.quantization or {}, "")
    method = fields.text("quant_method", "").lower()
    if method not in _METHODS:
        near = ", ".join(_METHODS)
        raise ConfigError(f"{spec.name}: quantization with {method!r:.80} is not one of {near}")
    codes, parts = _METHODS[method](fields)
    ignored = tuple(_pattern(name) for name in _ignored(fields))
    return codes.name, Recipe(codes, floats, parts, ignored)


def _fp8_of_config(fields: Fields) -> tuple[Codes, tuple[Part, ...]]:
    if "weight_block_size" not in fields:
        return _CODES["fp8"], _LINEAR
    outputs, inputs = fields.each("weight_block_size", Fields.integer, 2)
    return replace(_CODES["fp8-block"], block_outputs=outputs, block_inputs=inputs), _LINEAR


def _grouped_of_config(fields: Fields) -> tuple[Codes, tuple[Part, ...]]:
    """GPTQ and AWQ; a group of -1 is all inputs."""
    bits = fields.integer("bits", 4)
    group = max(0, fields.integer("group_size", 128, minimum=-1))
    return Codes(f"int{bits}-g{group}", bits, "fp16", 2 + bits / 8, 1, group), _LINEAR


def _compressed_of_config(fields: Fields) -> tuple[Codes, tuple[Part, ...]]:
    groups = fields.table("config_groups")
    section = Fields(fields.path, next(iter(groups.values()), {}))
    weights = section.section("weights")
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    strategy, group = weights.text("strategy", "channel"), weights.integer("group_size", 0, -1)
    has_inputs = section.raw("input_activations") is not None
    arithmetic: Arithmetic = "fp16"
    if has_inputs and bits == 8:
        arithmetic = "fp8" if kind == "float" else "int8"
    if kind == "float" and bits == 4:
        return _CODES["nvfp4"], _LINEAR
    if strategy == "block":
        outputs, inputs = weights.each("block_structure", Fields.integer, 2)
        return Codes("fp8-block", bits, arithmetic, 2.0, outputs, inputs), _LINEAR
    outputs = 0 if strategy == "tensor" else 1
    inputs = group if strategy == "group" else 0
    name = f"{'fp' if kind == 'float' else 'int'}{bits}" + (f"-g{inputs}" if inputs else "")
    return Codes(name, bits, arithmetic, 2.0, outputs, inputs), _LINEAR


def _mxfp4_of_config(fields: Fields) -> tuple[Codes, tuple[Part, ...]]:
    return _CODES["mxfp4"], ("experts",)


def _bitsandbytes_of_config(fields: Fields) -> tuple[Codes, tuple[Part, ...]]:
    if fields.boolean("load_in_8bit", False):
        return _CODES["int8"], _LINEAR
    # Scales of scales: a byte for 64 numbers, and a float32 for 256 of these.
    nested = fields.boolean("bnb_4bit_use_double_quant", False)
    return replace(_CODES["nf4"], scale_bytes=1 + 4 / 256 if nested else 4.0), _LINEAR


def _modelopt_of_config(fields: Fields) -> tuple[Codes, tuple[Part, ...]]:
    algorithm = fields.text("quant_algo", "FP8")
    return _CODES["nvfp4" if "FP4" in algorithm.upper() else "fp8"], _LINEAR


_METHODS: dict[str, Callable[[Fields], tuple[Codes, tuple[Part, ...]]]] = {
    "fp8": _fp8_of_config,
    "fbgemm_fp8": _fp8_of_config,
    "gptq": _grouped_of_config,
    "awq": _grouped_of_config,
    "compressed-tensors": _compressed_of_config,
    "mxfp4": _mxfp4_of_config,
    "bitsandbytes": _bitsandbytes_of_config,
    "modelopt": _modelopt_of_config,
}


def _ignored(fields: Fields) -> list[str]:
    for name in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        if name in fields:
            return fields.texts(name)
    return []


def _pattern(name: str) -> str:
    """A regular expression for the modules that a config names: itself, or all below it."""
    if name.startswith("re:"):
        return f"^(?:{name[3:]})"
    plain = ".*".join(map(re.escape, name.split("*")))
    return rf"(?:^|\.){plain}(?:\.|$)"


# -- mixes of GGUF types --------------------------------------------------------------------------

# How llama.cpp calls what a mix treats in a way of its own.
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.down_proj": "ffn_down",
    "mlp.experts.down_proj": "ffn_down",
    "mlp.shared_expert.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class GgmlCodes:
    """A type of GGUF files; products with quantized ones are computed in int8."""

    name: str
    bits: float

    @property
    def arithmetic(self) -> Arithmetic:
        return {"F32": "fp32", "F16": "fp16", "BF16": "fp16"}.get(self.name, "int8")  # type: ignore[return-value]

    def num_bytes(self, outputs: int, inputs: int) -> float:
        return outputs * max(1, inputs) * self.bits / 8


def ggml_codes(type: Any) -> GgmlCodes:
    """Of a ``GGMLType``."""
    from octavo.quantization.ggml_types import block_shape

    values, size = block_shape(type)
    return GgmlCodes(type.name, size * 8 / values)


@dataclass(frozen=True, slots=True)
class GgufMix:
    """What llama.cpp's quantizer makes for a target such as Q4_K_M."""

    target: str
    facts: Any = field(hash=False)
    is_tied: bool

    @classmethod
    def of(cls, spec: ModelSpec, target: str) -> GgufMix:
        from octavo.quantization.gguf_mixes import ModelFacts

        attention = [m for layer in spec.layers for m in layer.mixers if isinstance(m, Attention)]
        heads, kv_heads = (attention[0].heads, attention[0].kv_heads) if attention else (1, 1)
        facts = ModelFacts(spec.num_layers, heads, kv_heads, spec.tie_embeddings)
        return cls(target, facts, spec.tie_embeddings)

    def type_of(self, weight: WeightShape) -> GgmlCodes:
        from octavo.quantization.ggml_types import GGMLType
        from octavo.quantization.gguf_mixes import type_of

        if not weight.inputs or weight.part == "router":
            return ggml_codes(GGMLType.F32)
        name = self._name(weight)
        return ggml_codes(type_of(name, (weight.outputs, weight.inputs), self.target, self.facts))

    def _name(self, weight: WeightShape) -> str:
        if weight.part == "head":
            return "token_embd.weight" if self.is_tied else "output.weight"
        if weight.layer is None:
            return "token_embd.weight"
        return f"blk.{weight.layer}.{_GGUF_NAMES.get(weight.name, 'other')}.weight"
