"""Bytes that a model needs, before it is loaded: one arithmetic for all who ask.

Which matrices a model has follows from its config; how many bytes each takes, from the type that it
has in the file and from what the kernels make of it:

    types = weight_types(checkpoint, config)      or one type for all, as GGMLType.Q4_K
    matrices(config, types)               packed, for the native kernels
    matrices(config, types, as_stored)    as they are in the file, for the reference ops
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from octavo.base.errors import ConfigError, UnsupportedModelError
from octavo.kernels.cpu.layout import (
    ARITHMETIC,
    KV_FORMATS,
    LATENT_TYPES,
    PACKED_FORMATS,
    columns_bytes,
    kv_token_bytes,
    latent_row_bytes,
    latent_weight_format,
    packed_bytes,
)
from octavo.kernels.parts import WHOLE, Part
from octavo.models.config import EMBEDDING, HEAD, KVSpec, ModelConfig
from octavo.models.registry import model_class
from octavo.quantization.ggml_types import GGMLType, row_bytes

if TYPE_CHECKING:
    from octavo.kernels.cpu.coded import Packing
    from octavo.models.checkpoint import Checkpoint
    from octavo.quantization.base import Weight


class MatrixSpec(NamedTuple):
    """A matrix from ``k`` values to ``n``, by the name of its parameter. ``is_exact``: it is held
    in float32, whatever its file has. ``share`` as of a ``WeightMatrix``. ``is_latent``: it makes
    keys and values of latents, for which there are kernels of their own."""

    name: str
    n: int
    k: int
    is_exact: bool = False
    share: tuple[int, int] | None = None
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """A weight as a step uses it; see ``octavo.core.executor.WeightMatrix``."""

    is_head: bool
    num_params: int
    num_bytes: int
    arithmetic: str
    share: tuple[int, int] | None = None


class Coded(NamedTuple):
    """Codes with scales, in place of a type: what they become, and their bytes in the files."""

    packing: Packing
    num_bytes: int


Type = GGMLType | Coded
# How some kernels keep a matrix that has a type in its file.
Keep = Callable[[MatrixSpec, Type], WeightMatrix]


# -- weights --------------------------------------------------------------------------------------


def shapes(config: ModelConfig) -> Iterator[MatrixSpec]:
    """The matrices that a step reads whole, if at all: all but tables, of which it reads rows."""
    from octavo.layers.experts import Router, shares  # a model is made, without a weight
    from octavo.layers.latent_attention import LatentAttention
    from octavo.layers.linear import Linear, LMHead

    model = model_class(config.architecture)(config)
    share_of = shares(model)
    latent = set()
    for name, module in model.named_modules():
        if isinstance(module, LatentAttention):
            latent.add(id(module.kv_b_proj))
        elif isinstance(module, Linear | LMHead | Router):
            n, k = module.weight.shape
            share, is_latent = share_of.get(id(module)), id(module) in latent
            yield MatrixSpec(f"{name}.weight", n, k, module.weight.exact, share, is_latent)


def choosable(config: ModelConfig) -> list[MatrixSpec]:
    """The matrices whose type may be chosen."""
    return [each for each in shapes(config) if each.name != HEAD and not each.is_exact]


def packed(shape: MatrixSpec, type: Type) -> WeightMatrix:
    """Size as the native kernels pack it. UnsupportedModelError: they have no format for it."""
    if isinstance(type, Coded):
        format, group, is_reordered = type.packing
    elif type in PACKED_FORMATS:
        (format, group), is_reordered = PACKED_FORMATS[type], False
    else:
        raise UnsupportedModelError(f"{shape.name}: the native kernels cannot run {type.name}")
    if shape.is_latent:
        format, group, is_reordered = latent_weight_format(format), 0, False
    num_bytes = packed_bytes(format, shape.n, shape.k, group) + columns_bytes(shape.k, is_reordered)
    return _matrix(shape, num_bytes, ARITHMETIC[format])


def as_stored(shape: MatrixSpec, type: Type) -> WeightMatrix:
    """Size as the reference ops keep it on a CPU: the bytes of the file."""
    num_bytes = type.num_bytes if isinstance(type, Coded) else shape.n * row_bytes(type, shape.k)
    return _matrix(shape, num_bytes, "torch float32")


def _matrix(shape: MatrixSpec, num_bytes: int, arithmetic: str) -> WeightMatrix:
    return WeightMatrix(shape.name == HEAD, shape.n * shape.k, num_bytes, arithmetic, shape.share)


def matrices(
    config: ModelConfig, types: Type | Mapping[str, Type], keep: Keep = packed
) -> list[WeightMatrix]:
    """The weights that a step reads, as they will lie in memory.

    Args:
        types: of all, or of each by the name of its parameter, as ``weight_types`` has them.
    """

    def type_of(shape: MatrixSpec) -> Type:
        if shape.is_exact:
            return GGMLType.F32
        return types[shape.name] if isinstance(types, Mapping) else types

    return [keep(shape, type_of(shape)) for shape in shapes(config)]


def weight_types(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Type]:
    """The type of each parameter, from the tables of a checkpoint: no weight is read, but the
    scales of codes, which say what becomes of them. ModelFileError if their parts do not fit."""
    from octavo.models.tensor_map import source_of

    types: dict[str, Type] = {}
    for name, source in source_of(checkpoint, config).items():
        type = None if source.further else checkpoint.tensors[source.tensor].type
        types[name] = type or _type_of_parts(source.read(checkpoint))
    if config.tie_embeddings:
        types[HEAD] = types[EMBEDDING]
    return types


def _type_of_parts(weight: Weight) -> Type:
    from octavo.kernels.cpu.coded import packing_of  # where there are any
    from octavo.quantization.base import StoredWeight
    from octavo.quantization.coded import CodedWeight

    if isinstance(weight, StoredWeight):  # what no kernel takes as codes was read as floats
        return weight.type
    assert isinstance(weight, CodedWeight), weight
    return Coded(packing_of(weight), weight.nbytes)


# -- keys and values ------------------------------------------------------------------------------


def kv_bytes_per_token(config: ModelConfig, dtype: str, part: Part = WHOLE) -> int:
    """Bytes that one token's keys and values take in all layers of a rank, by the type of the cache
    as results call it: ``float32``, ``int8``, ``int4``...

    ConfigError if heads of the model do not fit the type.
    """
    return kv_bytes_of(kv_layers_of(config, part), dtype)


def kv_bytes_of(layers: Iterable[KVSpec], dtype: str) -> int:
    """Return the bytes that one token takes in these layers."""
    return sum(_kv_bytes(layer, dtype) for layer in layers)


def kv_layers_of(config: ModelConfig, part: Part) -> tuple[KVSpec, ...]:
    """The KV layout of each layer that attends, with the KV heads of one rank. Latent vectors are
    of all heads, and every rank has them."""
    num_kv_heads = len(part.of_kv_heads(config.num_heads, config.num_kv_heads))
    return tuple(
        layer if layer.kind == "latent" else replace(layer, num_kv_heads=num_kv_heads)
        for layer in config.kv_layers
    )


def _kv_bytes(layer: KVSpec, dtype: str) -> int:
    if layer.kind == "latent":
        return _latent_bytes(layer, dtype)
    assert layer.key_dim == layer.value_dim, "there are no kernels for heads of two sizes"
    return layer.num_kv_heads * kv_token_bytes(dtype, layer.key_dim)


def _latent_bytes(layer: KVSpec, dtype: str) -> int:
    if dtype not in LATENT_TYPES:
        raise ConfigError(
            f"KV of {dtype} is for keys and values, and this model keeps latent vectors, which are "
            f"both at once: choose {', '.join(LATENT_TYPES)}"
        )
    return latent_row_bytes(dtype, layer.key_dim, layer.value_dim)


def native_kv_bytes_per_token(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """The same of a type that the native kernels have; ConfigError for others."""
    if dtype not in KV_FORMATS:
        raise ConfigError(f"there is no native KV cache of {dtype}: {', '.join(KV_FORMATS)}")
    return kv_bytes_per_token(config, dtype)
