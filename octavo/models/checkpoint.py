"""Model files as tables of tensors: Hugging Face folders of safetensors, and GGUF files.

Weights are data here, never code: pickled checkpoints are refused, whatever a config says about
classes to import is not looked at, and an index can only name files beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from octavo.base.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.base.fields import Fields
from octavo.base.model_files import ModelFolder, begins_as_gguf, is_engine_folder, split_parts
from octavo.models.config import ModelConfig
from octavo.models.config_gguf import config_from_gguf
from octavo.models.config_hf import config_from_hf
from octavo.models.gguf import GGUFFile
from octavo.models.quantized_hf import find_parts, is_of_activations, weight_format
from octavo.models.unsupported_models import check_generates
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.ggml_types import FLOAT_TYPES, READABLE_TYPES, GGMLType

if TYPE_CHECKING:
    from octavo.models.family import Family, TensorNames
    from octavo.models.safetensors import SafetensorsFile
    from octavo.quantization.formats.stored import StoredTensor

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SAFETENSORS_TYPES = {type.name: type for type in FLOAT_TYPES}  # which have the same names there
# Tensors of old encoders that only count 0, 1, 2, ... or are all 0, in int64.
_COUNTERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One weight of a checkpoint, of which no data has been read.

    ``shape`` and ``type`` are None where several tensors make it up: it is what ``read`` gives.
    """

    shape: tuple[int, ...] | None
    type: GGMLType | None
    num_bytes: int
    path: Path  # the file that it is in, or that its first tensor is in


class Checkpoint(Protocol):
    """The files of one model. Tensors are views of the mapped files, read when they are used."""

    @property
    def path(self) -> Path:
        """The path that a user would give for the model: a folder, or the first GGUF file."""
        ...

    @property
    def origin(self) -> Checkpoint:
        """The checkpoint whose files and tokenizer these are: this one, or for a checkpoint that
        computes its weights the one that it computes them from."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...

    @property
    def files(self) -> list[Path]:
        """The files that weights are in, sorted."""
        ...

    @property
    def quantization(self) -> str | None:
        """The method by which the weights are quantized; None if they are not."""
        ...

    def read(self, name: str) -> Weight: ...

    def config(self) -> ModelConfig: ...

    def names(self, family: Family) -> TensorNames:
        """The names of tensors in files of this kind, for a family."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at ``path``: a folder with ``config.json`` and safetensors, or a GGUF file.

    ModelNotFoundError if nothing is there; ModelFileError if it is damaged, or not of these kinds.
    """
    path = Path(path)
    if path.is_dir():
        return SafetensorsFolder(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist")
    if path.suffix == ".gguf" or begins_as_gguf(path):
        return GGUFFiles(path)
    if path.suffix in _PICKLED:
        _refuse_pickle(path)
    if path.suffix == ".safetensors":
        raise ModelFileError(
            path, "one file of a checkpoint; give the folder that has it and its config.json"
        )
    raise ModelFileError(path, "is neither a folder of safetensors nor a .gguf file")


class SafetensorsFolder:
    """A Hugging Face folder: ``config.json``, and ``model.safetensors`` or shards with an index.

    Where its config names a method of quantization, some tensors are parts of weights. ``tensors``
    has the weights, under the names that they had before they were quantized.
    """

    def __init__(self, path: Path):
        self.path = path
        self._folder = ModelFolder(path)
        # First of all: tensors of models that octavo does not run may be of any kind.
        check_generates(self._folder.read_json("config.json") or {}, path)
        self._file_of: dict[str, SafetensorsFile] = {}
        # The weight that was read last: of those of all experts, each is asked for by itself.
        self._latest: tuple[str, Weight] | None = None
        if (whole := self._folder.find("model.safetensors")) is not None:
            self._open(whole)
        elif (index := self._folder.read_json(_INDEX)) is not None:
            self._open_shards(index, path / _INDEX)
        else:
            self._refuse_without_weights()
        self._format = weight_format(self._folder)
        self._parts = {} if self._format is None else find_parts(self._format, self._file_of)
        self.tensors = self._entries()

    @property
    def origin(self) -> Checkpoint:
        return self

    @property
    def files(self) -> list[Path]:
        return sorted({file.path for file in self._file_of.values()})

    @property
    def quantization(self) -> str | None:
        return self._format.name if self._format is not None and self._parts else None

    def config(self) -> ModelConfig:
        config = self._folder.read_json("config.json")
        if config is None:
            raise ModelFileError(self.path, "the folder has no config.json")
        generation = self._folder.read_json("generation_config.json")
        return config_from_hf(config, generation, path=self.path.absolute() / "config.json")

    def read(self, name: str) -> Weight:
        parts = self._parts.get(name)
        if parts is not None:
            if self._latest is None or self._latest[0] != name:
                self._latest = name, self._assemble(name, parts)
            return self._latest[1]
        file = self._file_of[name]
        dtype, shape = file.tensors[name]
        return StoredWeight(_SAFETENSORS_TYPES[dtype], file.data(name), shape)

    def _assemble(self, name: str, parts: Mapping[str, str]) -> Weight:
        assert self._format is not None, "parts are found by a format"
        stored = {part: self._stored(tensor) for part, tensor in parts.items()}
        with np.errstate(all="ignore"):  # scales may be any numbers, as those of GGUF files
            return self._format.assemble(name, stored)

    def names(self, family: Family) -> TensorNames:
        return family.hf_names

    def _open_shards(self, index: Mapping[str, Any], index_path: Path) -> None:
        fields = Fields(index_path, index)
        shard_of = fields.table("weight_map")
        if not shard_of:
            raise fields.error("weight_map", "names no tensors")
        for shard in sorted(set(map(str, shard_of.values()))):
            self._open(self._find_shard(shard, index_path))
        for name, shard in shard_of.items():
            file = self._file_of.get(name)
            if file is None or file.path.name != shard:
                found = "in no shard" if file is None else f"in {file.path.name}"
                raise ModelFileError(
                    index_path, f"it should be in {shard}, but is {found}", field=name
                )
        extra = [name for name in self._file_of if name not in shard_of]
        if extra:
            raise ModelFileError(
                index_path, f"shards have tensors that the index has not: {_list(extra)}"
            )

    def _find_shard(self, name: str, index_path: Path) -> Path:
        if "/" in name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise ModelFileError(
                index_path, f"{name!r:.100} is not the name of a safetensors file beside it"
            )
        path = self._folder.find(name, named_in=index_path)
        if path is None:
            raise ModelFileError(index_path, f"the file {name} is missing")
        return path

    def _open(self, path: Path) -> None:
        """Add the tensors of one safetensors file; its data is mapped, not read."""
        from octavo.models.safetensors import SafetensorsFile  # not for a start from GGUF

        file = SafetensorsFile(path)
        for name in file.tensors:
            if name in self._file_of:
                raise ModelFileError(path, f"also in {self._file_of[name].path.name}", field=name)
            self._file_of[name] = file

    def _entries(self) -> dict[str, TensorEntry]:
        """The table of weights, in the order of the files."""
        entries: dict[str, TensorEntry] = {}
        weight_of = {
            tensor: name for name, parts in self._parts.items() for tensor in parts.values()
        }
        for tensor, file in self._file_of.items():
            name = weight_of.get(tensor)
            if name is None:
                if tensor.endswith(_COUNTERS):
                    continue
                if self._format is None or not is_of_activations(tensor):
                    entries[tensor] = _plain_entry(tensor, file)
            elif name not in entries:
                tensors = self._parts[name].values()
                num_bytes = sum(self._file_of[each].num_bytes(each) for each in tensors)
                entries[name] = TensorEntry(None, None, num_bytes, file.path)
        return entries

    def _stored(self, tensor: str) -> StoredTensor:
        from octavo.quantization.formats.stored import StoredTensor

        file = self._file_of[tensor]
        dtype, shape = file.tensors[tensor]
        return StoredTensor(dtype, shape, file.data(tensor), file.path, tensor)

    def _refuse_without_weights(self) -> NoReturn:
        if is_engine_folder(self.path):
            raise ModelFileError(
                self.path, "an engine folder, which has no weights as a checkpoint has them"
            )
        pickled = sorted(p for p in self.path.iterdir() if p.suffix in _PICKLED)
        if pickled:
            _refuse_pickle(pickled[0])
        ggufs = sorted(p.name for p in self.path.glob("*.gguf"))
        if ggufs:
            raise ModelFileError(self.path, f"give one of the files in it: {', '.join(ggufs)}")
        raise ModelFileError(self.path, "the folder has no model.safetensors, whole or in shards")


class GGUFFiles:
    """A GGUF file, or all parts of one that was split (``name-00001-of-00003.gguf``)."""

    quantization: str | None = "gguf"

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[Path, GGUFFile] = {}
        self.tensors: dict[str, TensorEntry] = {}
        for part in _split_parts(path):
            file = self._files[part] = GGUFFile(part)
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise ModelFileError(
                        part, f"also in {self.tensors[name].path.name}", field=name
                    )
                self.tensors[name] = TensorEntry(tensor.shape, tensor.type, tensor.num_bytes, part)
        self.metadata = next(iter(self._files.values())).metadata
        self._config: ModelConfig | None = None

    @property
    def origin(self) -> Checkpoint:
        return self

    @property
    def files(self) -> list[Path]:
        return sorted(self._files)

    def config(self) -> ModelConfig:
        if self._config is None:  # which looks through the vocabulary
            self._config = config_from_gguf(self.metadata, self.tensors, path=self.path)
        return self._config

    def read(self, name: str) -> Weight:
        file = self._files[self.tensors[name].path]
        tensor = file.tensors[name]
        if tensor.type not in READABLE_TYPES:
            raise UnsupportedModelError(
                f"{file.path} ({name}): tensors of {tensor.type.name} are not supported, but "
                f"{', '.join(known.name for known in READABLE_TYPES)} are"
            )
        if tensor.type not in FLOAT_TYPES and len(tensor.shape) < 2:
            raise UnsupportedModelError(
                f"{file.path} ({name}): {tensor.type.name} is only supported for matrices"
            )
        if tensor.type is GGMLType.MXFP4:
            from octavo.quantization.formats.mxfp4 import read_blocks

            return read_blocks(file.data(name))
        return StoredWeight(tensor.type, file.data(name), tensor.shape)

    def names(self, family: Family) -> TensorNames:
        return family.gguf_names


def _plain_entry(name: str, file: SafetensorsFile) -> TensorEntry:
    dtype, shape = file.tensors[name]
    type = _SAFETENSORS_TYPES.get(dtype)
    if type is None:
        raise UnsupportedModelError(
            f"{file.path} ({name}): tensors of {dtype} are not supported, but "
            f"{', '.join(_SAFETENSORS_TYPES)} are"
        )
    return TensorEntry(shape, type, file.num_bytes(name), file.path)


def _split_parts(path: Path) -> list[Path]:
    names = split_parts(path.name)
    if path.name != names[0]:
        raise ModelFileError(path, f"a part of a split file; give the first, {names[0]}")
    folder = ModelFolder(path.parent, path.resolve().parent)
    found = {name: folder.find(name) for name in names[1:]}
    missing = [name for name, part in found.items() if part is None]
    if missing:
        raise ModelFileError(path, f"parts are missing: {_list(missing)}")
    return [path, *filter(None, found.values())]


def _refuse_pickle(path: Path) -> NoReturn:
    raise ModelFileError(
        path,
        "pickled checkpoints can run code and are not read; look for the safetensors of this "
        "model, or convert it (huggingface.co/spaces/safetensors/convert)",
    )


def _list(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
