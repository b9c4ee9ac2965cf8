"""``Family``: the declaration of a model family, from which its checkpoints are read and written.

It names the model class that runs the family and maps both kinds of checkpoint (Hugging Face
folders, GGUF files) to it: tensor names and layouts, config keys and their defaults. It stands in
the module of the model class, and one line of ``registry.py`` says where::

    QWEN3 = Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        gguf="qwen3",
        model=LlamaForCausalLM,
        gguf_names=GGUF_NAMES,
        hf_defaults={**HF_DEFAULTS, "head_dim": 128},
        from_hf=lambda fields, config: {"qk_norm": True},
    )

The readers and writers of files (``config*.py``, ``loader.py``, ``parameters.py``) do what all
families have in common and ask the `Family` for the rest; none of them tests for an architecture by
its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from octavo.base.fields import Fields
    from octavo.models.config import Activation, ModelConfig
    from octavo.models.ignored_keys import Meaningless
    from octavo.quantization.base import Weight

# (fields of a file, the ModelConfig that the shared reader made of them) -> the ModelConfig fields
# that this family reads differently.
ReadConfig = Callable[["Fields", "ModelConfig"], Mapping[str, Any]]
# ModelConfig -> entries of a file, which replace those of the shared writer or are added to them.
WriteConfig = Callable[["ModelConfig"], Mapping[str, Any]]


def _nothing(*_: Any) -> Mapping[str, Any]:
    return {}


ArrayFunction = Callable[["np.ndarray"], "np.ndarray"]  # of float32

# (config, name of a parameter) -> a value for each row of its tensor; None where there is none.
OfRows = Callable[["ModelConfig", str], "np.ndarray | None"]


def no_rows(*_: Any) -> None:
    """Return None: an `OfRows` of families that have nothing to say of rows."""


def _as_it_is(config: ModelConfig) -> ModelConfig:
    return config


class FileValues(NamedTuple):
    """Conversion of a parameter whose values a kind of file stores differently: functions of
    float32 arrays, to octavo's values and back, which may change the shape."""

    read: ArrayFunction
    write: ArrayFunction


class Joined(NamedTuple):
    """A module whose weight several tensors of a file make up.

    Args:
        parts: the tensors' modules, in their order, by the names that `TensorNames` lead to.
        split: a config to a function for each part, which takes it out of the whole weight.
        join: the parts' weights to the whole one. ValueError if their shapes do not fit.
    """

    parts: tuple[str, ...]
    split: Callable[[ModelConfig], Iterable[ArrayFunction]]
    join: Callable[[list[Weight]], Weight]


def concatenated(
    parts: tuple[str, ...], sizes: Callable[[ModelConfig], tuple[int, ...]], axis: int = 0
) -> Joined:
    """A module whose weight is the concatenation of tensors.

    Args:
        sizes: the rows of each part in a model of some config; its columns if ``axis`` is 1.
        axis: 0 joins rows, which are outputs; 1 joins columns, which are inputs.
    """

    def split(config: ModelConfig) -> Iterator[ArrayFunction]:
        ends = list(accumulate(sizes(config)))
        for start, end in zip([0, *ends], ends, strict=False):
            part = slice(start, end)
            yield itemgetter(part if axis == 0 else (slice(None), part))

    return Joined(parts, split, partial(_concatenation, axis=axis))


def _concatenation(parts: list[Weight], axis: int) -> Weight:
    """The weights one after the other: as they are stored if all have one type, else in float32."""
    import numpy as np

    from octavo.quantization.base import StoredWeight, stored_floats

    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    stored = [part for part in parts if isinstance(part, StoredWeight)]
    types = {part.type for part in stored}
    if len(types) == 1 and len(stored) == len(parts):
        is_vector = len(shape) == 1  # whose bytes are one row
        data = np.concatenate([part.data for part in stored], 1 if is_vector else axis)
        return StoredWeight(types.pop(), data, tuple(shape))
    return stored_floats(np.concatenate([part.dequantize() for part in parts], axis))


class TensorNames:
    """The map between tensor names of one kind of checkpoint file and octavo's parameter names.

    Args:
        top: {name of a module in the file: name of octavo's module}, outside of the layers.
        layer: the same for modules of a layer. Modules that are in neither map have the same name
            on both sides. The suffix, ``weight`` or ``bias``, is kept, unless a key has it too. An
            ``N`` stands for any number; with an ``N`` in octavo's name alone, the file's tensor
            stacks all experts, as ``ffn_up_exps`` has every ``mlp.experts.N.up_proj``.
        layers: the prefix before a layer's number in the file; by default that of GGUF files.
        transposed: modules, by the file's names, whose weights the file has as [inputs, outputs].
        interleaved: fused modules (see `Family`), by octavo's names, whose rows in the file
            alternate between their parts: first row of each part, second row of each, and so on.
        fused: replaces `Family.fused` for this kind of file.
        values: {end of a parameter's name: conversion} for parameters whose values the file stores
            differently.
        joined: {octavo's module: how several tensors of the file make up its weight}; they are
            joined when the weight is read, and split again when it is written.
    """

    def __init__(
        self,
        top: Mapping[str, str],
        layer: Mapping[str, str],
        layers: str = "blk",
        transposed: tuple[str, ...] = (),
        interleaved: tuple[str, ...] = (),
        fused: Mapping[str, tuple[str, ...]] | None = None,
        values: Mapping[str, FileValues] | None = None,
        joined: Mapping[str, Joined] | None = None,
    ):
        self.fused, self._values, self._joined = fused, values or {}, joined or {}
        self._top, self._layer, self._layers = dict(top), dict(layer), layers
        self._transposed = tuple(f".{each}{end}" for each in transposed for end in ("", ".weight"))
        self._interleaved = tuple(f".{module}" for module in interleaved)

    @property
    def is_plain(self) -> bool:
        """Whether the file uses octavo's names throughout."""
        return not self._top and not self._layer

    def parameter(self, tensor: str) -> str | None:
        """The parameter of a tensor in the file: ``blk.3.attn_q.weight`` is
        ``model.layers.3.self_attn.q_proj.weight``. None for a tensor that is no part of the
        model."""
        return _translated(tensor, self._layers, self._top, self._layer, _LAYERS)

    def tensor(self, parameter: str) -> str:
        """The tensor in the file of a parameter; the inverse of ``parameter``."""
        top, layer = _inverse(self._top), _inverse(self._layer)
        return _translated(parameter, _LAYERS, top, layer, self._layers)

    def has_module(self, module: str) -> bool:
        """Whether the file has a tensor of its own for one of octavo's modules in a layer."""
        return any(ours.removesuffix(".weight") == module for ours in self._layer.values())

    def is_transposed(self, tensor: str) -> bool:
        return tensor.endswith(self._transposed)

    def is_of_all_experts(self, tensor: str) -> bool:
        return EACH in (self.parameter(tensor) or "")

    def is_interleaved(self, parameter: str) -> bool:
        return parameter.rpartition(".")[0].endswith(self._interleaved)

    def values_of(self, parameter: str) -> FileValues | None:
        """The conversion of a parameter's values; None if the file has the same values."""
        ends = (end for end in self._values if parameter.endswith(f".{end}"))
        return self._values.get(next(ends, ""))

    def joined_with(self, parameter: str) -> tuple[str, list[str], Joined] | None:
        """Return, for a parameter of the file that is part of a `Joined` one, the whole parameter,
        the names of all parts, and how they are joined; None for others."""
        for whole, joined in self._joined.items():
            for part in joined.parts:
                if around := _around(part, parameter):
                    return whole.join(around), [each.join(around) for each in joined.parts], joined
        return None

    def pieces_of(self, parameter: str, config: ModelConfig) -> dict[str, ArrayFunction]:
        """The tensors that make up a `Joined` parameter, by their names in the file, with the
        functions that take them out of the whole [N, K]; none for others."""
        for whole, joined in self._joined.items():
            if around := _around(whole, parameter):
                names = [self.tensor(part.join(around)) for part in joined.parts]
                return dict(zip(names, joined.split(config), strict=True))
        return {}


class HFNames(TensorNames):
    """Tensor names of Hugging Face folders: octavo's own, but for the given exceptions.

    The text model of a multi-modal checkpoint is found under ``language_model`` as well.

    Args:
        ignored: a regular expression of tensors that are no part of the model, such as masks.
        prefix: what stands before all names but that of the head. It may be missing in the file: a
            model that was saved without its head has none.
        more: further arguments of `TensorNames`.
    """

    def __init__(
        self,
        top: Mapping[str, str] | None = None,
        layer: Mapping[str, str] | None = None,
        layers: str = "model.layers",
        *,
        ignored: str | None = None,
        prefix: str = "model.",
        **more: Any,
    ):
        super().__init__(top or {}, layer or {}, layers, **more)
        self._ignored = re.compile("|".join(filter(None, (_NOT_OF_THE_MODEL, ignored))))
        self._prefix = prefix

    def parameter(self, tensor: str) -> str | None:
        if self._ignored.fullmatch(tensor):
            return None
        tensor = tensor.replace("model.language_model.", "model.", 1)
        tensor = tensor.removeprefix("language_model.")
        if not tensor.startswith((self._prefix, "model.", "lm_head.")):
            tensor = self._prefix + tensor
        return super().parameter(tensor)


EACH = ".N."  # in a name: stands for the number of each expert

_LAYERS = "model.layers"
_NOT_OF_THE_MODEL = r".*rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..*"


def _translated(
    name: str, layers: str, top: Mapping[str, str], layer: Mapping[str, str], to_layers: str
) -> str:
    if name in top:
        return top[name]
    match = re.fullmatch(rf"{re.escape(layers)}\.(\d+)\.(.+)", name)
    names, rest = (layer, match[2]) if match else (top, name)
    if rest in names:
        rest = names[rest]
    else:
        module, dot, suffix = rest.rpartition(".")
        in_full = _renamed(rest, names)
        rest = _renamed(module, names) + dot + suffix if in_full == rest else in_full
    return f"{to_layers}.{match[1]}.{rest}" if match else rest


def _renamed(module: str, names: Mapping[str, str]) -> str:
    number = re.search(r"\.(\d+)\.", module)
    numbered = module.replace(number[0], EACH, 1) if number else module
    if module in names or numbered not in names or number is None:
        return names.get(module, module)
    return names[numbered].replace(EACH, number[0], 1)


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for theirs, ours in names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family: models that are run by one model class and have the same kind of files.

    Args:
        architecture: the name in ``architectures`` of ``config.json``, and in `ModelConfig`.
        model_type: of ``config.json``; ``registry.py`` lists further ones that mean the same.
        gguf: ``general.architecture`` of its GGUF files; None where llama.cpp has no name for it.
        model: the model class, a ``registry.CausalLM``.
        hf_names: tensor names in Hugging Face folders.
        gguf_names: tensor names in GGUF files.
        fused: modules of a file whose rows are those of several of octavo's, one after the other:
            ``{"self_attn.qkv_proj": ("self_attn.q_proj", ...)}``. Weights are cut by rows when they
            are loaded. For both kinds of file, unless their ``TensorNames`` have their own.
        hf_fields: {key of Llama's ``config.json``: this family's name for it}.
        gguf_fields: the same for GGUF metadata, without the architecture's prefix.
        hf_defaults: values of absent keys of ``config.json``, which published configs rely on; by
            the family's names.
        hf_ignored: keys of ``config.json`` that no reader asks for, by the family's names, each
            with a rule for the values that change nothing (`ignored_keys`). A config with any other
            unread key is refused. gguf_ignored: the same for GGUF metadata.
        hf_interleaved, gguf_interleaved: whether rope rotates the pairs (2 i, 2 i + 1) in such
            files, or (i, i + half). Where they differ, conversion reorders rows of q and k.
        activations: the activation functions that its MLPs may have.
        norm_plus_one: Hugging Face folders store norm weights less one. (GGUF files never do.)
        next_token_layers: its multi-token prediction (MTP) modules, if a checkpoint has them, are a
            decoder layer of the same class; see ``speculation/mtp.py``.
        exceeds_float16: its activations overflow float16; bfloat16 is used in its place.
        row_order: (config, parameter) -> the row numbers of a folder's tensor in octavo's order;
            None where the order is the same.
        gguf_factors: (config, parameter) -> factors that GGUF files have multiplied into its rows:
            one for each, or one for all. gguf_config: the config without these factors.
        gguf_needs_head: llama.cpp refuses GGUF files of this kind without ``output.weight``: a
            model with a tied embedding is written with a copy of it.
        written_gguf_names: the tensor names for writing, where ``gguf_names`` maps several names to
            one module, or values depend on the config. written_gguf_entries: metadata of a
            rewritten GGUF file that replace those of its source.
        from_hf, from_gguf: read what is particular to the family; see `ReadConfig`. ``from_gguf``
            is given `GGUFFields`.
        to_hf, to_gguf: write what these read; see `WriteConfig`.
    """

    architecture: str
    model_type: str
    model: type
    gguf: str | None = None
    hf_names: TensorNames = field(default_factory=HFNames)
    gguf_names: TensorNames = field(default_factory=HFNames)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hf_fields: Mapping[str, str] = field(default_factory=dict)
    gguf_fields: Mapping[str, str] = field(default_factory=dict)
    hf_ignored: Mapping[str, Meaningless] = field(default_factory=dict)
    gguf_ignored: Mapping[str, Meaningless] = field(default_factory=dict)
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    hf_interleaved: bool = False
    gguf_interleaved: bool = False
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    norm_plus_one: bool = False
    exceeds_float16: bool = False
    next_token_layers: bool = False
    row_order: OfRows = no_rows
    gguf_factors: OfRows = no_rows
    gguf_config: Callable[[ModelConfig], ModelConfig] = _as_it_is
    gguf_needs_head: bool = False
    written_gguf_names: Callable[[ModelConfig], TensorNames] | None = None
    written_gguf_entries: WriteConfig = _nothing
    from_hf: ReadConfig = _nothing
    from_gguf: ReadConfig = _nothing
    to_hf: WriteConfig = _nothing
    to_gguf: WriteConfig = _nothing

    @property
    def has_plain_folders(self) -> bool:
        """Whether every parameter is a tensor of the same name in a Hugging Face folder."""
        return not self.fused and self.hf_names.is_plain

    def parts(self, parameter: str, names: TensorNames | None = None) -> tuple[str, ...]:
        """The parameters whose rows a file's parameter consists of, in their order, if it is fused
        in files with these names; else the parameter alone."""
        for whole, parts in self._fused(names).items():
            if around := _around(whole, parameter):
                return tuple(part.join(around) for part in parts)
        return (parameter,)

    def whole(self, parameter: str, names: TensorNames) -> str:
        """The fused parameter that has the rows of a parameter in files with these names; the
        parameter itself if none has. The inverse of ``parts``."""
        for whole, parts in self._fused(names).items():
            if EACH in whole and not names.has_module(whole):
                continue  # this kind of file stacks experts, and does not fuse their parts
            for part in parts:
                if match := _of_module(part, parameter):
                    fused = whole.replace(EACH, f".{match['N']}.") if EACH in whole else whole
                    return f"{match['head']}.{fused}.{match['suffix']}"
        return parameter

    def _fused(self, names: TensorNames | None) -> Mapping[str, tuple[str, ...]]:
        return self.fused if names is None or names.fused is None else names.fused

    def names_to_write(self, config: ModelConfig) -> TensorNames:
        """The tensor names of a GGUF file that is to be written."""
        choose = self.written_gguf_names
        return self.gguf_names if choose is None else choose(config)


def _of_module(module: str, parameter: str) -> re.Match[str] | None:
    pattern = re.escape(module).replace(re.escape(EACH), r"\.(?P<N>\d+)\.")
    return re.fullmatch(rf"(?P<head>.*)\.{pattern}\.(?P<suffix>[^.]+)", parameter)


def _around(module: str, parameter: str) -> tuple[str, str] | None:
    """Split a parameter's name at a module's name: the text before and after it."""
    head, found, suffix = parameter.rpartition(f".{module}.")
    return (f"{head}.", f".{suffix}") if found else None
