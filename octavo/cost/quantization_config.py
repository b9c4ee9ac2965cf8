"""Types of weights by the ``quantization_config`` of a model, without reading them.

Wider than ``octavo.quantization.formats``, which reads weights: only types and names are needed.
Fields that could change the size of a weight and that are not known here are refused.

ModelOpt writes the same into ``hf_quant_config.json``, beside a ``config.json`` that may say
nothing; MLX writes ``quantization``. ``section_of`` brings all of them to one form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.base.linear_regex import PatternError
from octavo.cost.model_spec import ModelSpec
from octavo.cost.module_names import REGEX, ModulePatterns
from octavo.cost.rank_model import Arithmetic
from octavo.cost.unread_keys import check_quantization
from octavo.cost.weight_rules import LINEAR, Named, Recipe
from octavo.cost.weight_type import QUANTIZED, WeightType

# Methods of their own here, whose configs do not name them.
_MLX, _MODELOPT = "mlx", "modelopt"
_IGNORED = (
    *("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude"),
    *("llm_int8_skip_modules",),
)


def section_of(config: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """The quantization config in a ``config.json``, with a ``quant_method``; None if there is
    none."""
    for section in (config, Fields(path, config).table("text_config", {})):
        fields = Fields(path, section)
        mlx = fields.table("quantization", None)
        found = fields.table("quantization_config", None) or fields.table(
            "compression_config", None
        )
        if found and _is_modelopt(found):
            return {"quant_method": _MODELOPT, **found}
        if mlx:  # newer versions say it twice
            return {**mlx, "quant_method": _MLX}
        if found:
            return dict(found)
    return None


def section_of_modelopt(document: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """The same of an ``hf_quant_config.json``."""
    found = Fields(path, document).table("quantization", None)
    return None if not found else {**found, "quant_method": _MODELOPT}


def _is_modelopt(section: Mapping[str, Any]) -> bool:
    producer = section.get("producer")
    is_named = isinstance(producer, Mapping) and producer.get("name") == _MODELOPT
    return is_named or "quant_algo" in section


def read(spec: ModelSpec, floats: WeightType) -> Recipe:
    """The modules that are quantized, and their types.

    Raises:
        ModelFileError: fields that make no sense.
        UnsupportedModelError: a method that is not known, or a field that is not known.
    """
    fields = Fields(spec.source or Path(spec.name), spec.quantization or {})
    method = _method(fields)
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{spec.name}: quantization with {method!r:.80} is not one of {', '.join(_METHODS)}"
        )
    ignored = _patterns(fields, *_IGNORED)
    recipe = _METHODS[method](fields, floats)
    check_quantization(spec.name, spec.quantization or {}, fields.asked)
    both = ModulePatterns((*recipe.ignored.patterns, *ignored.patterns))
    return replace(recipe, ignored=both)


_NAMED_SO = re.compile(r"(?:^|[-_.])(fp8|nvfp4|mxfp4|awq|gptq|w8a8|w4a16|[48]bit)(?:$|[-_.])", re.I)


def notes(spec: ModelSpec) -> list[str]:
    """Notes on the quantization for readers that size a model by its config alone."""
    section, found = spec.quantization or {}, []
    named = _NAMED_SO.search(spec.name)
    if not section and named is not None:
        found.append(
            f"the name says {named[1]}, and no file says how weights are quantized: they are "
            f"counted as {spec.dtype}; --quantization says otherwise"
        )
    if section.get("kv_cache_quant_algo") or section.get("kv_cache_scheme"):
        found.append(
            "the model comes with scales for keys and values of 8 bits, which engines use only "
            "where they are told to (--kv-cache-dtype fp8)"
        )
    return found


def _method(fields: Fields) -> str:
    method = fields.text("quant_method", "").lower()
    if not method and (fields.raw("load_in_4bit") or fields.raw("load_in_8bit")):
        return "bitsandbytes"  # before it had a name, there was only one
    return "modelopt" if method.startswith("modelopt") else method


def _patterns(fields: Fields, *names: str) -> ModulePatterns:
    """The patterns of the modules that fields list."""
    return _modules(
        fields, [each for name in names if name in fields for each in fields.texts(name)]
    )


def _modules(fields: Fields, patterns: Iterable[str]) -> ModulePatterns:
    try:
        return ModulePatterns(tuple(patterns))
    except PatternError as error:
        raise fields.error("ignore", str(error)) from None


# -- the same for all matrices --------------------------------------------------------------------


def _fp8(fields: Fields, floats: WeightType) -> Recipe:
    if "weight_block_size" not in fields:
        return Recipe.usual(QUANTIZED["fp8"], floats)
    outputs, inputs = fields.each("weight_block_size", Fields.integer, 2)
    block = replace(QUANTIZED["fp8-block"], block_outputs=outputs, block_inputs=inputs)
    return Recipe.usual(block, floats)


def _mxfp4(fields: Fields, floats: WeightType) -> Recipe:
    return Recipe.usual(QUANTIZED["mxfp4"], floats)


def _bitsandbytes(fields: Fields, floats: WeightType) -> Recipe:
    is_doubled = fields.boolean("bnb_4bit_use_double_quant", False)
    if fields.boolean("load_in_8bit", False):
        return Recipe.usual(QUANTIZED["int8"], floats)
    # Scales of scales: a byte for 64 numbers, and a float32 for 256 of these.
    nested = replace(QUANTIZED["nf4"], scale_bytes=1 + 4 / 256)
    return Recipe.usual(nested if is_doubled else QUANTIZED["nf4"], floats)


# -- integers with scales and zero points ---------------------------------------------------------


def _grouped(bits: int, group: int) -> WeightType:
    """The type of GPTQ and AWQ weights: a 16-bit scale and a zero point; no group means all
    inputs."""
    return WeightType(f"int{bits}-g{group}", bits, "fp16", 2 + bits / 8, 1, group)


def _grouped_of(fields: Fields, usual: WeightType | None = None) -> WeightType:
    """Find a type by ``bits`` and ``group_size``, a group of -1 being all inputs. ``usual``: the
    values of modules that say only one of them."""
    bits = fields.integer("bits", 4 if usual is None else int(usual.bits))
    group = fields.integer("group_size", 128 if usual is None else usual.block_inputs, minimum=-1)
    return _grouped(bits, max(0, group))


def _awq(fields: Fields, floats: WeightType) -> Recipe:
    # AutoAWQ called them otherwise.
    bits = fields.integer("w_bit", None) or fields.integer("bits", 4)
    group = fields.integer("q_group_size", None, minimum=-1)
    if group is None:
        group = fields.integer("group_size", 128, minimum=-1)
    return Recipe.usual(_grouped(bits, max(0, group)), floats)


def _gptq(fields: Fields, floats: WeightType) -> Recipe:
    """``dynamic`` has regular expressions of modules: after a minus of those that are left as they
    were, after a plus, or nothing, of those with settings of their own."""
    usual = _grouped_of(fields)
    named = []
    for key in fields.table("dynamic", {}):
        modules = _modules(fields, [f"{REGEX}{key.lstrip('+-:')}"])
        own = Fields(fields.path, fields.table("dynamic")).section(key, {})
        named.append(Named(modules, None if key.startswith("-") else _grouped_of(own, usual)))
    if fields.boolean("lm_head", False):
        named.append(Named(ModulePatterns(("lm_head",)), usual))
    inside = fields.raw("modules_in_block_to_quantize") or []
    if inside:  # lists of names within a layer: the others are left as they were
        nested = [name for part in inside for name in ([part] if isinstance(part, str) else part)]
        named.append(Named(_modules(fields, map(str, nested)), usual))
        return replace(Recipe.usual(usual, floats, named=tuple(named)), parts=())
    return Recipe.usual(usual, floats, named=tuple(named))


def _auto_round(fields: Fields, floats: WeightType) -> Recipe:
    """Intel's; ``extra_config`` has modules that have other bits."""
    usual = _grouped_of(fields)
    named = []
    for key in fields.table("extra_config", {}):
        own = Fields(fields.path, fields.table("extra_config")).section(key)
        mine = _grouped_of(own, usual)
        named.append(Named(_modules(fields, [key]), None if mine.bits >= 16 else mine))
    return Recipe.usual(usual, floats, named=tuple(named))


def _mlx(fields: Fields, floats: WeightType) -> Recipe:
    """MLX quantizes whatever multiplies, embedding, head and routers too; entries with the names of
    modules have settings of their own, or false."""
    usual = _mlx_type(fields)
    named = []
    for name in fields:
        value = fields.raw(name) if "." in name or name == "lm_head" else None
        if value is False:
            named.append(Named(_modules(fields, [name]), None))
        elif isinstance(value, Mapping):
            own = Fields(fields.path, value)
            named.append(Named(_modules(fields, [name]), _mlx_type(own, usual)))
    return Recipe(usual, floats, (*LINEAR, "embedding", "head", "router"), named=tuple(named))


_MLX_MODES = {"mxfp4": "mxfp4", "nvfp4": "nvfp4"}


def _mlx_type(fields: Fields, usual: WeightType | None = None) -> WeightType:
    """Affine: a scale and an offset of 16 bits for each group."""
    mode = fields.text("mode", "affine")
    if mode in _MLX_MODES:
        return replace(QUANTIZED[_MLX_MODES[mode]], arithmetic="fp16")
    if mode == "mxfp8":
        return WeightType("mxfp8", 8, "fp16", 1.0, 1, fields.integer("group_size", 32))
    if mode != "affine":
        raise fields.error("mode", f"{mode!r:.80} is not affine, mxfp4, mxfp8 or nvfp4")
    bits = fields.integer("bits", 4 if usual is None else int(usual.bits), maximum=16)
    group = fields.integer("group_size", 64 if usual is None else usual.block_inputs)
    return WeightType(f"int{bits}-g{group}", bits, "fp16", 4.0, 1, group)


# -- groups of modules with types of their own ----------------------------------------------------

_NOT_QUANTIZED = ("", "NONE", "NO_QUANT")
_ALGORITHMS: dict[str, WeightType] = {
    "FP8": QUANTIZED["fp8"],
    "FP8_PER_CHANNEL_PER_TOKEN": QUANTIZED["fp8"],
    "FP8_PB_WO": QUANTIZED["fp8-block"],
    "FP8_PB_REAL": QUANTIZED["fp8-block"],
    "FP8_BLOCK_SCALES": QUANTIZED["fp8-block"],
    "MXFP8": WeightType("mxfp8", 8, "fp8", 1.0, 1, 32),
    "NVFP4": QUANTIZED["nvfp4"],
    "NVFP4_AWQ": QUANTIZED["nvfp4"],
    "NVFP4_SVDQUANT": QUANTIZED["nvfp4"],
    "W4A8_NVFP4_FP8": replace(QUANTIZED["nvfp4"], arithmetic="fp8"),
    "W4A16_NVFP4": replace(QUANTIZED["nvfp4"], arithmetic="fp16"),
    "W4A8_MXFP4_FP8": replace(QUANTIZED["mxfp4"], arithmetic="fp8"),
    "MXFP4": QUANTIZED["mxfp4"],
    "W8A8_SQ_PER_CHANNEL": QUANTIZED["int8"],
    "INT8_SQ": QUANTIZED["int8"],
    "W8A16": replace(QUANTIZED["int8"], arithmetic="fp16"),
    "W4A16": _grouped(4, 128),
    "W4A16_AWQ": _grouped(4, 128),
    "INT4_AWQ": _grouped(4, 128),
    "W4A8_AWQ": replace(_grouped(4, 128), arithmetic="fp8"),
}


def _modelopt(fields: Fields, floats: WeightType) -> Recipe:
    algorithm = fields.text("quant_algo", "").upper()
    layers = fields.table("quantized_layers", {})
    if layers:
        return _by_layer(fields, layers, floats)
    if algorithm == "MIXED_PRECISION" or (not algorithm and "config_groups" in fields):
        return _compressed_tensors(fields, floats)
    fields.asked.add("config_groups")  # which say the same of all
    if algorithm in _NOT_QUANTIZED:
        return Recipe(floats, floats, ())
    return Recipe(_algorithm(fields, algorithm), floats, LINEAR)


def _algorithm(fields: Fields, name: str) -> WeightType:
    if name not in _ALGORITHMS:
        raise UnsupportedModelError(
            f"{fields.path}: quant_algo {name!r:.80} is not one of {', '.join(_ALGORITHMS)}"
        )
    found = _ALGORITHMS[name]
    group = fields.integer("group_size", found.block_inputs, minimum=0)
    return found if found.block_inputs in (0, group) else replace(found, block_inputs=group)


def _by_layer(fields: Fields, layers: Mapping[str, Any], floats: WeightType) -> Recipe:
    """``quantized_layers`` name each of them; others are left as they were."""
    fields.asked |= {"config_groups", "group_size"}  # which say less
    by_type: dict[WeightType, list[str]] = {}
    section = Fields(fields.path, layers)
    for name in layers:
        own = section.section(name)
        algorithm = own.text("quant_algo", "").upper()
        if algorithm not in _NOT_QUANTIZED:
            by_type.setdefault(_algorithm(own, algorithm), []).append(name)
    named = tuple(Named(_modules(fields, names), of) for of, names in by_type.items())
    return _only_named(floats, named)


def _only_named(floats: WeightType, named: tuple[Named, ...]) -> Recipe:
    types = [each.type for each in named if each.type is not None]
    return Recipe(types[0] if types else floats, floats, (), named=named)


def _compressed_tensors(fields: Fields, floats: WeightType) -> Recipe:
    """Groups with targets: names of modules, or of a class of them, which is all linears."""
    named, linears = [], None
    groups = fields.section("config_groups")
    for name in fields.table("config_groups"):
        group = groups.section(name.removeprefix("config_groups."))
        targets = group.texts("targets") if "targets" in group else ["Linear"]
        found = _scheme(group) if "weights" in group else None
        names = [_CLASSES.get(each, each) for each in targets if each != _LINEARS]
        if len(names) < len(targets):
            linears = linears or found
        if names:
            named.append(Named(_modules(fields, names), found))
    if linears is None:
        return _only_named(floats, tuple(named))
    return Recipe(linears, floats, LINEAR, named=tuple(named))


_LINEARS = "Linear"
# Other classes of modules, by what these are called here.
_CLASSES = {"Embedding": "embed_tokens", "FusedMoE": "mlp.experts", "RoutedExperts": "mlp.experts"}


def _scheme(group: Fields) -> WeightType:
    """The type of the weights of one group."""
    weights = group.section("weights")
    bits, kind = weights.integer("num_bits", 8, maximum=64), weights.text("type", "int")
    has_groups = weights.integer("group_size", None, minimum=-1)
    activation_bits = 16
    if "input_activations" in group:
        activation_bits = group.section("input_activations").integer("num_bits", 8, maximum=64)
    implied = "channel" if has_groups is None or has_groups < 0 else "group"
    strategy = weights.text("strategy", implied)
    if kind == "float" and bits == 4:
        # Groups of 32 have scales that are powers of two, those of 16 have floats of 8 bits.
        fp4 = QUANTIZED["mxfp4" if has_groups == 32 else "nvfp4"]
        return replace(fp4, arithmetic="fp16" if activation_bits > 8 else fp4.arithmetic)
    arithmetic: Arithmetic = "fp16"
    if bits == 8 and activation_bits == 8:
        arithmetic = "fp8" if kind == "float" else "int8"
    outputs, inputs = 0 if strategy == "tensor" else 1, 0
    if strategy == "block":
        outputs, inputs = weights.each("block_structure", Fields.integer, 2)
    elif strategy in ("group", "tensor_group"):
        inputs = weights.integer("group_size")
    scale = 1.0 if kind == "float" and bits == 8 and inputs == 32 and outputs == 1 else 2.0
    if not weights.boolean("symmetric", True):
        scale += bits / 8
    name = f"{'fp' if kind == 'float' else 'int'}{bits}" + (f"-g{inputs}" if inputs else "")
    return WeightType(name, bits, arithmetic, scale, outputs, inputs)


_METHODS: dict[str, Callable[[Fields, WeightType], Recipe]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    _MODELOPT: _modelopt,
    _MLX: _mlx,
}
