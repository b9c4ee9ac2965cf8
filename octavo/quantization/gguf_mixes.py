"""Type of each tensor of a GGUF file, for the targets of llama.cpp's quantizer.

A target like Q4_K_M is a mix: most matrices have its base type, the matrices whose errors hurt most
have more bits. The mixes are those of llama.cpp (``llama-quant.cpp``) for models without experts,
so that a file made by octavo has the size and the speed that its name promises.

The matrices that expand latent vectors to keys and values (MLA) have 16 bits in every mix that is
not of floats: GGUF transposes the keys' part, which blocks do not survive, and they are a small
part of a model (0.2 % of DeepSeek-V3's weights, 0.4 % of V2-Lite's).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType, block_shape


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that the choice of types depends on.

    Args:
        is_tied: whether the embedding is the output matrix too.
        has_importance: whether quantization has an importance matrix.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    is_tied: bool
    has_importance: bool = False

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def is_70b(self) -> bool:
        """True for models as deep as the Llamas of 70B; their value matrices are relatively
        small."""
        return self.num_layers == 80 and self.num_heads != self.num_kv_heads


@dataclass(frozen=True)
class Where:
    """The layers that a rule is for: ``name`` is one of ``_PLACES``, some of which have a number.

    It is data, so that the planner's page can evaluate the same rules.
    """

    name: str
    number: int = 0

    def __call__(self, facts: ModelFacts, layer: int) -> bool:
        return _PLACES[self.name](facts, layer, self.number)


Rule = tuple[GGMLType, Where]


def _in_outer_and_every_third(facts: ModelFacts, layer: int, number: int) -> bool:
    """True in the first and the last eighth of layers, and in every third layer between them."""
    eighth = facts.num_layers // 8
    is_outer = layer < eighth or layer >= 7 * facts.num_layers // 8
    return is_outer or (layer - eighth) % 3 == 2


_PLACES: dict[str, Callable[[ModelFacts, int, int], bool]] = {
    "everywhere": lambda facts, layer, number: True,
    "first": lambda facts, layer, count: layer < count,
    "first part": lambda facts, layer, parts: layer < facts.num_layers // parts,
    "outer and every third": _in_outer_and_every_third,
    # Where four or more queries share a value head, whose matrix is then small.
    "shared values": lambda facts, layer, number: facts.queries_per_kv_head >= 4,
    "first part, with importance": lambda facts, layer, parts: (
        facts.has_importance and layer < facts.num_layers // parts
    ),
    "first part, without importance": lambda facts, layer, parts: (
        not facts.has_importance and layer < facts.num_layers // parts
    ),
}
_EVERYWHERE = Where("everywhere")
_WITH_SHARED_VALUES = Where("shared values")


@dataclass(frozen=True)
class Mix:
    """A target: its number in ``general.file_type``, its base type, and the rules for other types.

    The first rule that applies to a matrix gives its type; without one it has ``base``.
    """

    file_type: int
    base: GGMLType
    attn_v: tuple[Rule, ...] = ()
    ffn_down: tuple[Rule, ...] = ()
    attn_output: tuple[Rule, ...] = ()


def _iq4(file_type: int, base: GGMLType) -> Mix:
    return Mix(
        file_type,
        base,
        attn_v=((GGMLType.Q5_K, _WITH_SHARED_VALUES),),
        ffn_down=((GGMLType.Q5_K, Where("first part, without importance", 8)),),
    )


def _more_bits(file_type: int, base: GGMLType) -> Mix:
    rules = ((GGMLType.Q6_K, Where("outer and every third")),)
    return Mix(file_type, base, attn_v=rules, ffn_down=rules)


MIXES = {
    "F32": Mix(0, GGMLType.F32),
    "F16": Mix(1, GGMLType.F16),
    "BF16": Mix(32, GGMLType.BF16),
    "Q4_0": Mix(
        2, GGMLType.Q4_0, ffn_down=((GGMLType.Q4_1, Where("first part, with importance", 8)),)
    ),
    "Q4_1": Mix(3, GGMLType.Q4_1),
    "Q5_0": Mix(
        8, GGMLType.Q5_0, ffn_down=((GGMLType.Q5_1, Where("first part, with importance", 8)),)
    ),
    "Q5_1": Mix(9, GGMLType.Q5_1),
    "Q8_0": Mix(7, GGMLType.Q8_0),
    "Q2_K": Mix(
        10,
        GGMLType.Q2_K,
        attn_v=((GGMLType.Q4_K, _WITH_SHARED_VALUES), (GGMLType.Q3_K, _EVERYWHERE)),
        ffn_down=((GGMLType.Q3_K, _EVERYWHERE),),
        attn_output=((GGMLType.Q3_K, _EVERYWHERE),),
    ),
    "Q3_K_S": Mix(11, GGMLType.Q3_K),
    "Q3_K_M": Mix(
        12,
        GGMLType.Q3_K,
        attn_v=((GGMLType.Q5_K, Where("first", 2)), (GGMLType.Q4_K, _EVERYWHERE)),
        ffn_down=((GGMLType.Q5_K, Where("first part", 16)), (GGMLType.Q4_K, _EVERYWHERE)),
        attn_output=((GGMLType.Q4_K, _EVERYWHERE),),
    ),
    "Q3_K_L": Mix(
        13,
        GGMLType.Q3_K,
        attn_v=((GGMLType.Q5_K, _EVERYWHERE),),
        ffn_down=((GGMLType.Q5_K, _EVERYWHERE),),
        attn_output=((GGMLType.Q5_K, _EVERYWHERE),),
    ),
    "Q4_K_S": Mix(
        14,
        GGMLType.Q4_K,
        attn_v=((GGMLType.Q5_K, Where("first", 4)),),
        ffn_down=((GGMLType.Q5_K, Where("first part", 8)),),
    ),
    "Q4_K_M": _more_bits(15, GGMLType.Q4_K),
    "Q5_K_S": Mix(16, GGMLType.Q5_K),
    "Q5_K_M": _more_bits(17, GGMLType.Q5_K),
    "Q6_K": Mix(18, GGMLType.Q6_K),
    "IQ4_NL": _iq4(25, GGMLType.IQ4_NL),
    "IQ4_XS": _iq4(30, GGMLType.IQ4_XS),
}

# For rows that are not a multiple of 256: types with blocks of 32 and no fewer bits.
FALLBACKS = {
    GGMLType.Q2_K: GGMLType.Q4_0,
    GGMLType.Q3_K: GGMLType.Q4_0,
    GGMLType.Q4_K: GGMLType.Q5_0,
    GGMLType.Q5_K: GGMLType.Q5_1,
    GGMLType.Q6_K: GGMLType.Q8_0,
    GGMLType.IQ4_XS: GGMLType.IQ4_NL,
}

LATENT_TYPE = GGMLType.F16
_OF_LATENTS = re.compile(r"blk\.\d+\.attn_(?:k|v|kv)_b\.weight")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(attn_v|ffn_down|attn_output)(?:_exps|_shexp)?\.weight")


def type_of(name: str, shape: tuple[int, ...], target: str, facts: ModelFacts) -> GGMLType:
    """Type of a tensor in a file of a target.

    Args:
        name: of the tensor, as llama.cpp calls it.
        shape: outermost dimension first, as in torch. Vectors, norms and biases are F32.

    Raises:
        ValueError: ``target`` is not one of MIXES.
    """
    wanted = wanted_type_of(name, shape, target, facts)
    if wanted in FLOAT_TYPES:
        return wanted
    is_output = name == "output.weight" or (facts.is_tied and name == "token_embd.weight")
    # llama.cpp checks whether the output's rows are whole blocks of the base, not of its own type.
    if is_output and shape[-1] % block_shape(_mix(target).base)[0]:
        return _that_fits(GGMLType.Q8_0, shape[-1])
    return _that_fits(wanted, shape[-1])


def wanted_type_of(name: str, shape: tuple[int, ...], target: str, facts: ModelFacts) -> GGMLType:
    """Type of a tensor in a file of a target, if rows of any length fit any type."""
    mix = _mix(target)
    if len(shape) < 2 or name.endswith("_norm.weight") or not name.endswith(".weight"):
        return GGMLType.F32
    if mix.base in FLOAT_TYPES:
        return mix.base
    if _OF_LATENTS.fullmatch(name):
        return LATENT_TYPE
    if name == "output.weight" or (facts.is_tied and name == "token_embd.weight"):
        return GGMLType.Q8_0 if mix.base == GGMLType.Q8_0 else GGMLType.Q6_K
    return _type_in_layer(name, mix, facts)


def file_type(target: str) -> int:
    """Number of a target in ``general.file_type``; ValueError if it is not one of MIXES."""
    return _mix(target).file_type


def _mix(target: str) -> Mix:
    mix = MIXES.get(target)
    if mix is None:
        raise ValueError(f"{target!r} is no target of GGUF quantization; there are {[*MIXES]}")
    return mix


def _type_in_layer(name: str, mix: Mix, facts: ModelFacts) -> GGMLType:
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return mix.base
    layer, kind = int(match[1]), match[2]
    rules: tuple[Rule, ...] = getattr(mix, kind)
    type = next((type for type, holds in rules if holds(facts, layer)), mix.base)
    if kind == "attn_v" and facts.is_70b and type in (GGMLType.Q3_K, GGMLType.Q4_K):
        return GGMLType.Q5_K
    return type


def _that_fits(type: GGMLType, columns: int) -> GGMLType:
    """The type itself if rows are whole blocks of it, else a type whose blocks fit."""
    for candidate in (type, FALLBACKS.get(type, type)):
        if columns % block_shape(candidate)[0] == 0:
            return candidate
    return GGMLType.F16
