"""A folder that PEFT has written: ``adapter_config.json`` and ``adapter_model.safetensors``.

Two matrices stand for the change of each module, as float32, bfloat16 or float16::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     [rank, inputs]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     [outputs, rank]
    base_model.model.model.embed_tokens.lora_embedding_A               [rank, tokens]
    base_model.model.model.embed_tokens.lora_embedding_B               [outputs, rank]

Adapters come from anyone: they are data, and whatever is wrong with one is an error that names it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.base.errors import ModelFileError, ModelNotFoundError
from octavo.base.model_files import ModelFolder
from octavo.lora.limits import MAX_RANK
from octavo.lora.peft_config import PeftConfig, read_config
from octavo.models.safetensors import SafetensorsFile
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import FLOAT_TYPES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])"
    r"(?:\.default)?(?:\.weight)?"
)
_TYPES = {type.name: type for type in FLOAT_TYPES}
_PIECE = 1 << 20  # bytes that are hashed at a time


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """The change of a module's weight [N, K]: ``scale`` B A, with A [r, K] and B [N, r].

    ``module``: its name in the Hugging Face model that was trained.
    """

    module: str
    a: StoredWeight
    b: StoredWeight
    scale: float
    is_embedding: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class PeftFolder:
    """An open adapter. ``config``: its settings; ``path``: the folder.

    Raises:
        ModelNotFoundError: there is no such folder.
        ModelFileError: a file is missing or damaged.
        UnsupportedModelError: it is of a kind that octavo does not have.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelNotFoundError(f"{self.path}: there is no such folder of an adapter")
        folder = ModelFolder(self.path)
        config = folder.read_json(CONFIG)
        if config is None:
            raise ModelFileError(self.path, f"the folder has no {CONFIG}: it is no adapter of PEFT")
        self.config: PeftConfig = read_config(self.path / CONFIG, config)
        weights = folder.find(WEIGHTS)
        if weights is None:
            reason = f"the folder has no {WEIGHTS}"
            if folder.find(_PICKLED) is not None:
                reason += f", and {_PICKLED} can run code and is not read: save it as safetensors"
            raise ModelFileError(self.path, reason)
        self._file = SafetensorsFile(weights)
        self._pairs = self._find_pairs()
        self._check_targets()

    @property
    def modules(self) -> list[str]:
        return list(self._pairs)

    def changes(self) -> Iterator[ModuleChange]:
        """Yield the change of each module, whose numbers have been checked."""
        for module, names in self._pairs.items():
            rank = self.config.rank_of(module)
            a, b = (self._matrix(names[which]) for which in "AB")
            for which, found in (("A", a.shape[0]), ("B", b.shape[1])):
                if found != rank:
                    raise ModelFileError(
                        self._file.path,
                        f"the rank is {found}, and {CONFIG} says {rank}",
                        field=f"{names[which]:.200}",
                    )
            scale = self.config.scale_of(module)
            yield ModuleChange(module, a, b, scale, "lora_embedding_" in names["A"])

    def _find_pairs(self) -> dict[str, dict[str, str]]:
        """Return the names of the two tensors of each module."""
        pairs: dict[str, dict[str, str]] = {}
        for name in self._file.tensors:
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise self._error(name, _what_is(name))
            if pairs.setdefault(match["module"], {}).setdefault(match["which"], name) != name:
                raise self._error(name, f"a second {match['which']} of this module")
        if not pairs:
            raise ModelFileError(self._file.path, "it has no tensors")
        for names in pairs.values():
            if len(names) < 2:
                (name,) = names.values()
                missing = "B" if "A" in names else "A"
                raise self._error(name, f"the lora_{missing} that belongs to it is missing")
            if ("lora_embedding_" in names["A"]) != ("lora_embedding_" in names["B"]):
                raise self._error(names["A"], "half of an embedding, half of a linear")
        return pairs

    def _check_targets(self) -> None:
        """Raise ModelFileError if a target has no tensors: they were lost, or the name is wrong."""
        for name in self.config.targets:
            if not any(self.config.is_target(name, module) for module in self._pairs):
                raise ModelFileError(
                    self.config.path,
                    f"{name!r:.80} is in target_modules, and {WEIGHTS} has no tensors for it",
                    field="target_modules",
                )

    def _matrix(self, name: str) -> StoredWeight:
        dtype, shape = self._file.tensors[name]
        if dtype not in _TYPES:
            known = ", ".join(_TYPES)
            raise self._error(name, f"tensors of {dtype} are not supported, but {known} are")
        if len(shape) != 2 or not min(shape):
            raise self._error(name, f"the shape is {list(shape)}, and a matrix is needed")
        if min(shape) > MAX_RANK:
            raise self._error(
                name, f"the shape is {list(shape)}: ranks above {MAX_RANK} are not supported"
            )
        matrix = StoredWeight(_TYPES[dtype], self._file.data(name), shape)
        if not np.isfinite(matrix.floats()).all():
            raise self._error(name, "it has numbers that are NaN or infinite")
        return matrix

    def _error(self, name: str, reason: str) -> ModelFileError:
        return ModelFileError(self._file.path, reason, field=f"{name:.200}")


def _what_is(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "a magnitude of DoRA, which is not supported"
    if ".lora_" not in name:
        return "not a matrix of LoRA: modules that were trained whole are not supported"
    return "no name of a matrix that PEFT writes for a linear or an embedding"


def digest_of(path: str | Path) -> str:
    """Return a digest of an adapter's files: the same for the same content, wherever it lies.

    Raises:
        ModelNotFoundError, ModelFileError: it cannot be read.
    """
    found = hashlib.sha256()
    folder = ModelFolder(Path(path))
    if not Path(path).is_dir():
        raise ModelNotFoundError(f"{path}: there is no such folder of an adapter")
    for name in (CONFIG, WEIGHTS):
        file = folder.find(name)
        if file is None:
            raise ModelFileError(Path(path), f"the folder has no {name}: it is no adapter of PEFT")
        found.update(f"{name} {file.stat().st_size}\n".encode())
        try:
            with file.open("rb") as opened:
                while piece := opened.read(_PIECE):
                    found.update(piece)
        except OSError as error:
            raise ModelFileError(file, f"cannot be read: {error.strerror or error}") from error
    return found.hexdigest()[:32]
