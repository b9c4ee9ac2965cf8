"""Precision of a model: bytes of weights and cached tokens, and the type of products.

A quantization never treats all tensors alike: embeddings and heads mostly stay as they were, norms
and routers always. So a ``Precision`` is asked for each weight. It comes from a name (``fp8``,
``int4-g32``, ``Q4_K_M``), from the ``quantization_config`` of a model, or from the tables of its
files, which have the last word.

Bits of a weight, with scales: int4 with groups of 128 has 4 + 16/128, with zero points 4/128 more
(GPTQ, AWQ); mxfp4 4 + 8/32; nvfp4 4 + 8/16; fp8 8 and a scale for each output, or for 128 x 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from octavo.base.errors import ConfigError
from octavo.cost.kv_type import KvType, kv_type
from octavo.cost.model_spec import ModelSpec
from octavo.cost.weight_rules import Recipe, Rule, Uniform
from octavo.cost.weight_shape import WeightShape
from octavo.cost.weight_type import FLOAT_ALIASES, FLOATS, QUANTIZED, WeightType, quantized_type
from octavo.cost.weights import weights


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of weights and of cached tokens.

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
        """The type of a weight, or of the ``share`` of it that one device has."""
        part = share or weight
        return part.experts * self.type_of(weight).num_bytes(part.outputs, part.inputs)


def precision_of(
    spec: ModelSpec,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    dtype: str | None = None,
) -> Precision:
    """The types of a model's numbers.

    Args:
        quantization: a name of ``quantizations()``; None is what the model's files or its config
            say, and where they say nothing the floats of ``dtype``.
        kv_cache_dtype: see ``kv_type``; None is 16 bits, or 32 where ``dtype`` asks for them.
        dtype: of activations, and of weights of which nothing else is known; None is that of the
            config.

    Raises:
        ConfigError: a name is not known; the message has the nearest.
        ModelFileError: the model's files or its ``quantization_config`` make no sense.
    """
    floats = _floats(dtype or spec.dtype)
    is_wide = dtype is not None and floats.bits == 32
    kv = kv_type(kv_cache_dtype or ("float32" if is_wide else "bfloat16"))
    name, rule = _rule(spec, quantization, floats)
    return Precision(name, kv, rule, floats.bits / 8)


def weights_bytes(spec: ModelSpec, precision: Precision) -> int:
    """Bytes of the whole model, each tensor once."""
    return round(sum(precision.num_bytes(weight) for weight in weights(spec)))


def quantizations() -> list[str]:
    """Names that ``precision_of`` knows; ``int4-gN`` has groups of N."""
    from octavo.quantization.gguf_mixes import MIXES

    return [*FLOATS, *QUANTIZED, "int4-g32", *MIXES]


def _rule(spec: ModelSpec, quantization: str | None, floats: WeightType) -> tuple[str, Rule]:
    """The precision under the name that results have for it."""
    if quantization is not None:
        return quantization, _rule_by_name(spec, quantization, floats)
    if spec.source is not None:
        from octavo.cost.file_weights import stored_rule

        return "as stored", stored_rule(spec)
    if spec.quantization:
        from octavo.cost.quantization_config import read

        recipe = read(spec, floats)
        return recipe.name, recipe
    return floats.name, Uniform(floats)


def _floats(name: str) -> WeightType:
    name = FLOAT_ALIASES.get(name, name)
    if name not in FLOATS:
        raise ConfigError(f"dtype {name!r:.80} is not one of {', '.join(FLOATS)}")
    return FLOATS[name]


def _rule_by_name(spec: ModelSpec, name: str, floats: WeightType) -> Rule:
    from octavo.cost.gguf_mix import GgufMix
    from octavo.quantization.gguf_mixes import MIXES

    low = name.lower().replace("_", "-")
    if low in FLOATS or low in FLOAT_ALIASES:
        return Uniform(_floats(low))
    if (quantized := quantized_type(low)) is not None:
        return Recipe.usual(quantized, floats)
    if (target := name.upper().replace("-", "_")) in MIXES:
        return GgufMix.of(spec, target)
    known = {each.lower().replace("_", "-"): each for each in quantizations()}
    near = [known[each] for each in get_close_matches(low, known, 3)]
    hint = (
        f"do you mean {' or '.join(near)}?" if near else f"there are {', '.join(quantizations())}"
    )
    raise ConfigError(f"quantization {name!r:.80} is not known: {hint}")
