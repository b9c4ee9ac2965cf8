"""A family of models, declared: what its files call things, and what they mean by them.

A family stands in the file of its model, and one line of ``registry.py`` says where::

    QWEN3 = Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        gguf="qwen3",
        model=LlamaForCausalLM,
        gguf_names=GGUF_NAMES,
        hf_defaults={**HF_DEFAULTS, "head_dim": 128},
        from_hf=lambda fields, config: {"qk_norm": True},
    )

Who reads and writes files (``config*.py``, ``loader.py``, ``parameters.py``) does what all families
have in common, and asks the family for the rest: none of them knows an architecture by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from octavo.base.fields import Fields
    from octavo.models.config import Activation, ModelConfig
    from octavo.models.ignored_keys import Meaningless

# From the fields of a file, and the config that the shared readers made of them, to those fields of
# the config that mean something else in this family.
ReadConfig = Callable[["Fields", "ModelConfig"], Mapping[str, Any]]
# From a config to entries of a file, in place of those that the shared writers make, or besides.
WriteConfig = Callable[["ModelConfig"], Mapping[str, Any]]


def _nothing(*_: Any) -> Mapping[str, Any]:
    return {}


ArrayFunction = Callable[["np.ndarray"], "np.ndarray"]  # of float32

# From a config and the name of a parameter to something of each row of a tensor.
OfRows = Callable[["ModelConfig", str], "np.ndarray | None"]


def no_rows(*_: Any) -> None:
    return None


def _as_it_is(config: ModelConfig) -> ModelConfig:
    return config


class FileValues(NamedTuple):
    """Conversion of a parameter whose values a kind of file stores differently: functions of
    float32 arrays, to octavo's values and back, which may change the shape."""

    read: ArrayFunction
    write: ArrayFunction


class TensorNames:
    """Names of the tensors in a kind of file, for the names of octavo's modules.

    Args:
        top: from the name of a module in such a file to its name here, outside of layers.
        layer: the same in a layer. Names that are in neither are the same here; so is what follows
            a module's name, ``weight`` or ``bias``, unless a name in full is there. ``N`` stands
            for any number: a name with one only here is of a tensor of all experts, one behind the
            other, as ``ffn_up_exps`` is of each ``mlp.experts.N.up_proj``.
        layers: what stands before a layer's number.
        transposed: modules, by their names there, whose weights are there as [inputs, outputs].
        interleaved: modules whose rows there are those of the modules they are fused of in turn.
        fused: modules that are fused there, in place of those that the family says.
        values: parameters whose values are others there, by how their names here end.
        pieces: tensors that are several in a file to be, by how their names there end: how that of
            each piece ends, and what it has of all rows [N, K]. Who opens such a file puts them
            together before anything is asked by name.
    """

    def __init__(
        self,
        top: Mapping[str, str],
        layer: Mapping[str, str],
        layers: str,
        transposed: tuple[str, ...] = (),
        interleaved: tuple[str, ...] = (),
        fused: Mapping[str, tuple[str, ...]] | None = None,
        values: Mapping[str, FileValues] | None = None,
        pieces: Mapping[str, Mapping[str, ArrayFunction]] | None = None,
    ):
        self.fused, self._values, self._pieces = fused, values or {}, pieces or {}
        self._top, self._layer, self._layers = dict(top), dict(layer), layers
        self._transposed = tuple(f".{each}{end}" for each in transposed for end in ("", ".weight"))
        self._interleaved = tuple(f".{module}" for module in interleaved)

    @property
    def is_plain(self) -> bool:
        """Whether they are the names here."""
        return not self._top and not self._layer

    def parameter(self, tensor: str) -> str | None:
        """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``; None for what is
        no part of a model."""
        return _translated(tensor, self._layers, self._top, self._layer, _LAYERS)

    def tensor(self, parameter: str) -> str:
        """The other way."""
        top, layer = _inverse(self._top), _inverse(self._layer)
        return _translated(parameter, _LAYERS, top, layer, self._layers)

    def has_module(self, module: str) -> bool:
        """Whether a module of layers, by its name here, has one of its own there."""
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

    def pieces_of(self, tensor: str) -> dict[str, ArrayFunction]:
        """The tensors that one is in a file to be, by their names; none if it is written whole."""
        return {
            tensor.removesuffix(end) + piece: of_rows
            for end, pieces in self._pieces.items()
            if tensor.endswith(end)
            for piece, of_rows in pieces.items()
        }


class HFNames(TensorNames):
    """Tensor names of Hugging Face folders: octavo's own names, but for the exceptions given.

    ``ignored`` is a pattern of tensors that are no part of the model, beside rope's; ``prefix``
    what stands before all names but that of the head, and is left out where a model was saved
    without one. Models that see images have the text model under ``language_model``, in two ways.
    """

    def __init__(
        self,
        top: Mapping[str, str] | None = None,
        layer: Mapping[str, str] | None = None,
        layers: str = "model.layers",
        transposed: tuple[str, ...] = (),
        interleaved: tuple[str, ...] = (),
        ignored: str | None = None,
        prefix: str = "model.",
    ):
        super().__init__(top or {}, layer or {}, layers, transposed, interleaved)
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


class Joined(NamedTuple):
    """A module whose weight is the concatenation of several tensors of a file.

    Args:
        parts: the tensors' modules, in their order, by the names that `TensorNames` lead to.
        sizes: the rows of each (columns, if ``axis`` is 1) in a model of some config.
        axis: 0 joins rows, which are outputs; 1 joins columns.
    """

    parts: tuple[str, ...]
    sizes: Callable[[ModelConfig], tuple[int, ...]]
    axis: int = 0

    def split(self, config: ModelConfig) -> Iterator[ArrayFunction]:
        """Yield for each part the function that takes it out of the whole weight."""
        ends = list(accumulate(self.sizes(config)))
        for start, end in zip([0, *ends], ends, strict=False):
            part = slice(start, end)
            yield itemgetter(part if self.axis == 0 else (slice(None), part))


EACH = ".N."  # in a name: of every expert

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
    """Models that one class runs, and whose files are alike.

    Args:
        architecture: as ``architectures`` of ``config.json`` has it, and ``ModelConfig``.
        model_type: likewise; ``registry.py`` has others that are the same in all but name.
        gguf: ``general.architecture`` of its GGUF files; None where there are none.
        model: the class, a ``registry.CausalLM``.
        hf_names: of tensors in folders of safetensors.
        gguf_names: of tensors in GGUF files.
        fused: modules whose rows in files are those of several modules here, in their order:
            ``{"self_attn.qkv_proj": ("self_attn.q_proj", ...)}``, in both kinds of file, by the
            names that these lead to, unless ``TensorNames`` of one of them say otherwise.
        joined: modules whose weights are several tensors in files, in both kinds of file:
            ``{"mixer.in_proj_ba": Joined(("mixer.in_proj_b", "mixer.in_proj_a"), ...)}``.
        hf_fields: from fields of Llama's ``config.json`` to what they are called in the family's.
        gguf_fields: the same of GGUF metadata, without the architecture before them.
        hf_defaults: what a field of ``config.json`` means where it is absent, which published
            configs rely on; by the family's names.
        hf_ignored: fields that no reader asks for, by the family's names, with a rule for the
            values that mean nothing; any other is refused. gguf_ignored: the same of GGUF metadata.
        hf_interleaved, gguf_interleaved: whether rope turns neighbours, 2 i and 2 i + 1, in such
            files; where they differ, rows of queries and keys lie in another order in each.
        activations: that its MLPs have.
        norm_plus_one: folders store the weights of norms less one. (GGUF files never do.)
        next_token_layers: modules for drafting that its checkpoints may have are a layer of the
            model's own kind; see ``speculation/mtp.py``.
        exceeds_float16: its activations do, so that what runs it should be given bfloat16.
        row_order: of a parameter, fused or not, the rows of a folder's tensor in the order in which
            they are here; None where they lie so.
        gguf_factors: of a parameter, what GGUF files have multiplied into each of its rows, or into
            all, of what the config says of it; ``gguf_config``: a config that no longer says that.
        gguf_needs_head: llama.cpp refuses GGUF files of this kind without a matrix of their own for
            the output, so that a model whose embedding is that too is written with both.
        written_gguf_names: those of a file to be, where ``gguf_names`` have several for some, or
            one is written in pieces. written_gguf_entries: what such a file says, whatever the GGUF
            file that it is made of says there.
        from_hf, from_gguf: what is left to be read, see ``ReadConfig``. GGUF's are ``GGUFFields``.
        to_hf, to_gguf: and to be written.
    """

    architecture: str
    model_type: str
    model: type
    gguf: str | None = None
    hf_names: TensorNames = field(default_factory=HFNames)
    gguf_names: TensorNames = field(default_factory=HFNames)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined: Mapping[str, Joined] = field(default_factory=dict)
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
        """Whether each parameter is a tensor of its own name in a folder."""
        return not self.fused and self.hf_names.is_plain

    def parts(self, parameter: str, names: TensorNames | None = None) -> tuple[str, ...]:
        """The parameters that the rows of one are, where it is fused, in files with these names;
        else itself."""
        for whole, parts in self._fused(names).items():
            if around := _around(whole, parameter):
                return tuple(part.join(around) for part in parts)
        return (parameter,)

    def whole(self, parameter: str, names: TensorNames) -> str:
        """The other way: the fused parameter that one is rows of in files with such names; else
        itself. Not all that have the same of all experts in one tensor fuse them, too."""
        for whole, parts in self._fused(names).items():
            if EACH in whole and not names.has_module(whole):
                continue
            for part in parts:
                if match := _of_module(part, parameter):
                    fused = whole.replace(EACH, f".{match['N']}.") if EACH in whole else whole
                    return f"{match['head']}.{fused}.{match['suffix']}"
        return parameter

    def joined_with(self, parameter: str) -> tuple[str, tuple[str, ...], int] | None:
        """For a parameter of a file that is part of a `Joined` one: the whole parameter, all parts
        of it, and the axis; None for others."""
        for whole, joined in self.joined.items():
            for part in joined.parts:
                if around := _around(part, parameter):
                    parts = tuple(each.join(around) for each in joined.parts)
                    return whole.join(around), parts, joined.axis
        return None

    def pieces_of(self, parameter: str, config: ModelConfig) -> dict[str, ArrayFunction]:
        """The parts in a file of a `Joined` parameter, by name, with the functions that take them
        out of the whole; none for others."""
        for whole, joined in self.joined.items():
            if around := _around(whole, parameter):
                names = [part.join(around) for part in joined.parts]
                return dict(zip(names, joined.split(config), strict=True))
        return {}

    def _fused(self, names: TensorNames | None) -> Mapping[str, tuple[str, ...]]:
        return self.fused if names is None or names.fused is None else names.fused

    def names_to_write(self, config: ModelConfig) -> TensorNames:
        """Names of tensors in a GGUF file that is written."""
        choose = self.written_gguf_names
        return self.gguf_names if choose is None else choose(config)


def _of_module(module: str, parameter: str) -> re.Match[str] | None:
    pattern = re.escape(module).replace(re.escape(EACH), r"\.(?P<N>\d+)\.")
    return re.fullmatch(rf"(?P<head>.*)\.{pattern}\.(?P<suffix>[^.]+)", parameter)


def _around(module: str, parameter: str) -> tuple[str, str] | None:
    """Split a parameter's name at a module's name: the text before and after it."""
    head, found, suffix = parameter.rpartition(f".{module}.")
    return (f"{head}.", f".{suffix}") if found else None
