"""Merging an adapter into a model: a Hugging Face folder whose weights are W + scale B A."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.base.errors import ModelFileError
from octavo.lora.peft_folder import ModuleChange, PeftFolder
from octavo.models.checkpoint import Checkpoint
from octavo.models.config import EMBEDDING, HEAD
from octavo.models.hf_writer import float_tensor_of, write_hf_folder
from octavo.models.parameters import FileTensor, Parameters
from octavo.models.registry import family_of
from octavo.models.safetensors_writer import NewTensor
from octavo.quantization.base import StoredWeight, float_bytes
from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType


def merge_adapter(
    checkpoint: Checkpoint, adapter: PeftFolder, out: str | Path, dtype: GGMLType | None = None
) -> GGMLType:
    """Write the model with an adapter merged into a folder, where nothing is; return its type.

    Sums are computed in float32. A tied head that has a change of its own, or whose embedding has,
    becomes a matrix by itself. Quantized weights are dequantized.

    Args:
        dtype: F32, F16 or BF16; None: that of the model's embedding, BF16 where that is quantized.

    Raises:
        ModelError: a module is none of the model's, or of another shape.
        ConfigError: nothing can be written there.
    """
    parameters = Parameters(checkpoint)
    merged = _Merged(parameters, adapter)
    dtype = _type_of(parameters) if dtype is None else dtype
    write_hf_folder(
        out,
        checkpoint,
        merged.tensors(dtype),
        dtype=dtype,
        config=replace(parameters.config, tie_embeddings=merged.is_tied),
    )
    return dtype


def _type_of(parameters: Parameters) -> GGMLType:
    weight = parameters.weight(EMBEDDING)
    is_float = isinstance(weight, StoredWeight) and weight.type in FLOAT_TYPES
    return weight.type if isinstance(weight, StoredWeight) and is_float else GGMLType.BF16


class _Merged:
    """The tensors of a folder with an adapter's changes added to them.

    Modules of PEFT are tensors of such a folder, so that none has to be taken apart.
    """

    def __init__(self, parameters: Parameters, adapter: PeftFolder):
        self._parameters = parameters
        names = family_of(parameters.config.architecture).hf_names
        self._changes: dict[str, ModuleChange] = {}
        for change in adapter.changes():
            self._changes[names.parameter(f"{change.module}.weight") or change.module] = change
        tensors = {names.parameter(each.name) or each.name: each for each in parameters.tensors}
        self.is_tied = parameters.config.tie_embeddings and not (
            {EMBEDDING, HEAD} & self._changes.keys()
        )
        if parameters.config.tie_embeddings and not self.is_tied:
            tensors[HEAD] = replace(tensors[EMBEDDING], name=names.tensor(HEAD))
        self._tensors = tensors
        for parameter, change in self._changes.items():
            self._check(parameter, change, adapter)

    def tensors(self, dtype: GGMLType) -> Iterator[NewTensor]:
        for parameter, tensor in self._tensors.items():
            change = self._changes.get(parameter)
            if change is None:
                yield float_tensor_of(self._parameters, tensor, dtype)
            else:
                values = self._merged(parameter, tensor, change)
                yield NewTensor(tensor.name, dtype.name, values.shape, [float_bytes(values, dtype)])

    def _merged(self, parameter: str, tensor: FileTensor, change: ModuleChange) -> np.ndarray:
        (before,) = self._parameters.matrices(tensor)
        product = (change.b.floats() @ change.a.floats()) * np.float32(change.scale)
        is_turned = tensor.is_transposed or parameter == EMBEDDING
        merged: np.ndarray = before + (product.T if is_turned else product)
        return merged

    def _check(self, parameter: str, change: ModuleChange, adapter: PeftFolder) -> None:
        tensor = self._tensors.get(parameter)
        if tensor is None or tensor.num_experts is not None:
            raise _error(adapter, change, "the model has no tensor of this name to merge into")
        if (parameter == EMBEDDING) != change.is_embedding:
            raise _error(
                adapter, change, "lora_embedding_A and B are of embeddings, and these alone"
            )
        found = change.b.shape[0], change.a.shape[1]
        if (found[::-1] if change.is_embedding else found) != tensor.shape:
            raise _error(
                adapter,
                change,
                f"its change is {list(found)}, and the model's weight {list(tensor.shape)}",
            )


def _error(adapter: PeftFolder, change: ModuleChange, reason: str) -> ModelFileError:
    return ModelFileError(adapter.path, reason, field=f"{change.module:.200}")
