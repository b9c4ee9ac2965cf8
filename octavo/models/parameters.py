"""The parameters of any checkpoint as floats, in the layout that a file to be written has.

Two layouts of the same model differ in these things, and in nothing else:

====================  ====================================  =======================================
what                  ``"hf"``                              ``"gguf"``
====================  ====================================  =======================================
rows of q and k       Llama: pairs that turn together are   such pairs are neighbours (ggml's
                      half a head apart                     ``LLAMA_ROPE_TYPE_NORM``)
Gemma's norms         less one                              as they are multiplied
llama3's rope         numbers in the config                 a tensor of divisors
longrope              lists in the config                   two tensors of divisors
what scales layers    Falcon-H1: numbers in the config      multiplied into the weights
latents to heads      DeepSeek: one matrix                  two tensors, keys' and values'
====================  ====================================  =======================================

Nothing is read before it is asked for, and then only the rows that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.layers.module import Module, named_parameters
from octavo.layers.rope_angles import inverse_frequencies
from octavo.layers.rope_config import RopeConfig
from octavo.models.checkpoint import Checkpoint
from octavo.models.config import EMBEDDING, HEAD, ModelConfig
from octavo.models.family import ArrayFunction, Family, TensorNames, no_rows
from octavo.models.loader import load_checkpoint
from octavo.models.registry import family_of
from octavo.models.tensor_map import source_of
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.ggml_types import GGMLType

Layout = Literal["hf", "gguf"]

FREQ_FACTORS = "model.rotary_emb.freq_factors"
SHORT_FACTORS = "model.rotary_emb.short_factors"
LONG_FACTORS = "model.rotary_emb.long_factors"
_DIVISORS = (FREQ_FACTORS, SHORT_FACTORS, LONG_FACTORS)

_PIECE_VALUES = 1 << 22  # of a matrix, in memory at once as float32

# Llama 3's rope as it was published; only the trained length is looked for.
_LOW, _HIGH = 1.0, 4.0
_TRAINED_LENGTHS = tuple(1 << bits for bits in range(4, 21))


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A tensor of a file to be: the ``parts``, which are parameters, one below the other, or their
    rows in turn if it ``is_interleaved``.

    ``shape``: of these; the file has it as [inputs, outputs] if it ``is_transposed``. Those of all
    experts are one behind the other, and their number is the first dimension. ``order``: their rows
    as the file has them; ``write``: to what it has of them; None: they are there as they are.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    is_transposed: bool = False
    is_interleaved: bool = False
    num_experts: int | None = None
    order: np.ndarray | None = None
    write: ArrayFunction | None = None

    @property
    def is_put_together(self) -> bool:
        """Whether its rows are no rows of its parts in turn, so that it cannot be made of some."""
        is_turned = self.is_transposed or self.is_interleaved
        return is_turned or self.order is not None or self.write is not None

    @property
    def matrices(self) -> list[tuple[str, ...]]:
        """The parts of each expert; of all others, all."""
        count = len(self.parts) // (self.num_experts or 1)
        return [self.parts[i : i + count] for i in range(0, len(self.parts), count)]


def file_tensors(
    config: ModelConfig, layout: Layout, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[FileTensor]:
    """The parameters of a model as a file in some layout stores them, by their names and shapes."""
    family = family_of(config.architecture)
    names = family.hf_names if layout == "hf" else family.names_to_write(config)
    for tensor, parts in _parts_of_tensors(family, names, shapes).items():
        shape, count = (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:]), None
        named, values = names.parameter(tensor) or tensor, names.values_of(parts[0])
        if names.is_of_all_experts(tensor):
            count = len(parts) // len(family.parts(named, names))
            shape = (count, shape[0] // count, *shape[1:])
        order = family.row_order(config, family.whole(parts[0], names))
        whole = FileTensor(
            tensor,
            tuple(parts),
            shape,
            names.is_transposed(tensor),
            names.is_interleaved(named),
            count,
            None if order is None else np.argsort(order),
        )
        written = names.pieces_of(parts[0], config)
        if values is not None:
            written[tensor] = values.write
        if not written:
            yield whole
        yield from (_written(whole, *each) for each in written.items())


def _written(whole: FileTensor, name: str, write: ArrayFunction) -> FileTensor:
    shape = write(np.zeros(whole.shape, dtype=np.float32)).shape
    return replace(whole, name=name, shape=shape, write=write)


def _parts_of_tensors(
    family: Family, names: TensorNames, parameters: Iterable[str]
) -> dict[str, list[str]]:
    wholes: dict[str, list[str]] = {}
    for name in parameters:
        wholes.setdefault(family.whole(name, names), []).append(name)
    tensors: dict[str, list[str]] = {}
    for whole, parts in wholes.items():
        tensors.setdefault(names.tensor(whole), []).extend(parts)
    return tensors


class Parameters:
    """The parameters of an open checkpoint in one layout, by the names that Hugging Face has.

    ``config``: the model's, as a file in this layout says it. ``names``: in the model's order; a
    tied head is not among them (but see ``Family.gguf_needs_head``), nor are the divisors of rope,
    of which ``divisors`` has the values by name. ``tensors``: what a file has of these names, some
    of which may be the rows of one. ``exact``: those that models hold in float32, whatever their
    file has.

    Raises:
        ModelError: as of ``load_checkpoint``; or UnsupportedModelError where rope has divisors that
            no config of Hugging Face's can say.
    """

    def __init__(self, checkpoint: Checkpoint, *, layout: Layout = "hf"):
        self.checkpoint = checkpoint
        self.layout = layout
        stored = checkpoint.config()
        model = load_checkpoint(checkpoint, stored)  # says what is wrong with it, and reads little
        assert isinstance(model, Module)
        self._sources = source_of(checkpoint, stored)
        parameters = dict(named_parameters(model))
        family = family_of(stored.architecture)
        is_tied = stored.tie_embeddings
        if is_tied and layout == "gguf" and family.gguf_needs_head:
            is_tied = False
            parameters.setdefault(HEAD, parameters[EMBEDDING])
            self._sources[HEAD] = self._sources[EMBEDDING]
        self.exact = frozenset(name for name, each in parameters.items() if each.exact)
        self.names = tuple(
            name for name in parameters if name not in _DIVISORS and not (is_tied and name == HEAD)
        )
        divisors = {name: self.weight(name).floats() for name in _DIVISORS if name in self._sources}
        config = (_hf_layout if layout == "hf" else _gguf_layout)(stored, divisors)
        self.config = replace(config, tie_embeddings=is_tied)
        self._factors = family.gguf_factors if layout == "gguf" else no_rows
        self.divisors = divisors or _divisors(stored.rope)
        shapes = {name: self.shape(name) for name in self.names}
        self.tensors = tuple(file_tensors(self.config, layout, shapes))
        self._stored = stored
        self._norm_shift = np.float32(stored.norm_plus_one) - np.float32(self.config.norm_plus_one)

    def matrices(self, tensor: FileTensor) -> Iterator[np.ndarray]:
        """A tensor as a file has it, float32: of each expert, or all of it at once."""
        for names in tensor.matrices:
            parts = [self.rows(name) for name in names]
            if tensor.is_interleaved:
                rows = np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
            else:
                rows = np.concatenate(parts)
            if tensor.order is not None:
                rows = rows[tensor.order]
            if tensor.write is not None:
                rows = tensor.write(rows)
            yield np.ascontiguousarray(rows.T if tensor.is_transposed else rows)

    def pieces(self, tensor: FileTensor) -> Iterator[tuple[str, int, int]]:
        """Yield (parameter, first row, end) of some rows at a time, of which no more have to be in
        memory at once; for tensors whose rows are those of their parts, in order."""
        step = max(1, _PIECE_VALUES // prod(tensor.shape[1:]))
        for part in tensor.parts:
            for start in range(0, self.shape(part)[0], step):
                yield part, start, start + step

    def stored_whole(self, tensor: FileTensor) -> np.ndarray | None:
        """All of it as bytes, as ``stored_rows``; None where they would be other ones."""
        rows = [self.stored_rows(part) for part in tensor.parts]
        found = [each for each in rows if each is not None]
        is_turned = tensor.is_transposed or tensor.is_interleaved
        if len(found) < len(rows) or is_turned or tensor.write is not None:
            return None
        together = np.concatenate(found)
        return together if tensor.order is None else together[tensor.order]

    def weight(self, name: str) -> Weight:
        """The weight as the checkpoint stores it, in the checkpoint's layout."""
        return self._sources[name].read(self.checkpoint)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weight(name).shape

    def type(self, name: str) -> GGMLType | None:
        """The GGUF type of a parameter in the checkpoint; None if it has none."""
        weight = self.weight(name)
        return weight.type if isinstance(weight, StoredWeight) else None

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Some rows of a matrix, float32 [rows, K]; some values of a vector, float32 [n].

        MissingPackageError if they are quantized and PyTorch, which dequantizes them, is missing.
        """
        weight = self._part(name, start, stop)
        values = weight.dequantize() if len(weight.shape) == 2 else weight.floats()
        factors = self._factors(self._stored, name)
        if factors is not None:
            these = factors if len(factors) == 1 else factors[start:stop]
            values = (values.T * these.astype(np.float32)).T
        return values + self._norm_shift if _is_norm(name) and self._norm_shift else values

    def plus(self, name: str) -> float:
        """The constant that the model adds to the stored values of a parameter."""
        return float(self.config.norm_plus_one and _is_norm(name))

    def stored_rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        """The same as bytes in the type of the file: uint8 [rows, bytes of a row].

        None for what this layout stores as other numbers, and for what has no such type.
        """
        weight = self._part(name, start, stop)
        if not isinstance(weight, StoredWeight) or (_is_norm(name) and self._norm_shift):
            return None
        if self._factors(self._stored, name) is not None:
            return None
        return weight.data.reshape(weight.shape[0], -1)  # a vector's values are rows here

    def _part(self, name: str, start: int, stop: int | None) -> Weight:
        """Rows, or values, in the order of this layout."""
        weight, order = self.weight(name), self.order(name)
        return weight.narrow(start, stop) if order is None else weight.select(order[start:stop])

    def order(self, name: str) -> np.ndarray | None:
        """The rows of the checkpoint as they follow each other in this layout, int64 [rows]; None
        if that is their order."""
        source, wanted = self._stored.rope, self.config.rope
        rotated = rotated_rows(name, self.config)
        if source.interleaved == wanted.interleaved or rotated is None:
            return None
        return rope_row_order(self.shape(name)[0], *rotated, wanted)


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith("mixer.norm.weight")


def rotated_rows(name: str, config: ModelConfig) -> tuple[int, int] | None:
    """Head size, and first rotated row of a head, for parameters of q and k, whose order of rows
    depends on how rope pairs them. None for all others."""
    module, latent = name.rpartition(".")[0], config.latent
    if latent is None:
        return (config.head_dim, 0) if module.endswith((".q_proj", ".k_proj")) else None
    if module.endswith((".q_proj", ".q_b_proj")):
        return latent.query_dim, latent.nope_dim
    if module.endswith(".kv_a_proj_with_mqa"):
        return latent.kv_rank + latent.rope_dim, latent.kv_rank
    return None


def rope_row_order(num_rows: int, head_dim: int, first: int, wanted: RopeConfig) -> np.ndarray:
    """The row of the other layout that each row is, int64 [num_rows]."""
    half = wanted.rotary_dim // 2
    head = np.arange(head_dim)
    pairs = head[first : first + wanted.rotary_dim]
    # Value i and its partner: 2 i and 2 i + 1 where they are neighbours, i and half + i elsewhere.
    head[first : first + wanted.rotary_dim] = (
        pairs.reshape(2, half).T.reshape(-1)
        if wanted.interleaved
        else pairs.reshape(half, 2).T.reshape(-1)
    )
    starts = np.arange(0, num_rows, head_dim)
    return (starts[:, None] + head).reshape(-1)


# -- configs in a layout --------------------------------------------------------------------------


def _hf_layout(config: ModelConfig, divisors: Mapping[str, np.ndarray]) -> ModelConfig:
    family = family_of(config.architecture)
    rope = config.rope
    if FREQ_FACTORS in divisors:
        rope = _llama3_rope(replace(rope, has_freq_factors=False), divisors[FREQ_FACTORS])
    elif divisors:
        rope = replace(
            rope,
            has_freq_factors=False,
            short_factor=tuple(divisors[SHORT_FACTORS].tolist()),
            long_factor=tuple(divisors[LONG_FACTORS].tolist()),
        )
    config = replace(config, rope=rope, norm_plus_one=family.norm_plus_one)
    return _with_interleaved(config, family.hf_interleaved)


def _gguf_layout(config: ModelConfig, _: Mapping[str, np.ndarray]) -> ModelConfig:
    family = family_of(config.architecture)
    rope = config.rope
    if rope.scaling == "llama3":
        rope = RopeConfig(
            theta=rope.theta,
            rotary_dim=rope.rotary_dim,
            original_max_position=rope.max_position,
            max_position=rope.max_position,
            has_freq_factors=True,
        )
    elif rope.scaling == "longrope":
        rope = replace(rope, has_freq_factors=True, short_factor=(), long_factor=())
    config = replace(family.gguf_config(config), rope=rope, norm_plus_one=False)
    return _with_interleaved(config, family.gguf_interleaved)


def _with_interleaved(config: ModelConfig, interleaved: bool) -> ModelConfig:
    rope, local_rope = replace(config.rope, interleaved=interleaved), config.local_rope
    if local_rope is not None:
        local_rope = replace(local_rope, interleaved=interleaved)
    return replace(config, rope=rope, local_rope=None if local_rope == rope else local_rope)


def _divisors(rope: RopeConfig) -> dict[str, np.ndarray]:
    """The divisors of rope angles, float32 [rotary_dim / 2], for scalings that GGUF files store
    so."""
    if rope.scaling == "longrope":
        lists = {SHORT_FACTORS: rope.short_factor, LONG_FACTORS: rope.long_factor}
        return {name: np.array(values, dtype=np.float32) for name, values in lists.items()}
    return {FREQ_FACTORS: _freq_factors(rope)} if rope.scaling == "llama3" else {}


def _freq_factors(rope: RopeConfig) -> np.ndarray:
    """The divisors of llama3's scaling."""
    nowhere = np.empty(0)  # these scalings are the same at all positions
    unscaled = inverse_frequencies(replace(rope, scaling="default"), nowhere)
    return unscaled / inverse_frequencies(rope, nowhere)


def _llama3_rope(rope: RopeConfig, freq_factors: np.ndarray) -> RopeConfig:
    """The scaling that has these divisors. A GGUF file has nothing but them."""
    factor = float(freq_factors.max())
    if factor == 1.0:
        return rope
    for length in _TRAINED_LENGTHS:
        found = replace(
            rope,
            scaling="llama3",
            factor=factor,
            original_max_position=length,
            low_freq_factor=_LOW,
            high_freq_factor=_HIGH,
        )
        if np.allclose(_freq_factors(found), freq_factors, rtol=1e-5, atol=0):
            return found
    raise UnsupportedModelError(
        "rope_freqs.weight: these divisors are not of Llama 3's rope scaling, and a config of "
        "Hugging Face's has no other place for them: write a GGUF file instead"
    )
