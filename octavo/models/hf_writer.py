"""A whole model as a Hugging Face folder: config, tokenizer, weights.

    checkpoint = open_checkpoint("model.gguf")
    write_hf_folder("out", checkpoint)                      the same model, unquantized
    write_hf_folder("out", checkpoint, tensors, quantization_config={...})    what was made of it

Transformers, vLLM and octavo itself read the folder. It is there whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.files import NewFolder
from octavo.base.model_files import ModelFolder, check_free
from octavo.models.checkpoint import Checkpoint, GGUFFiles
from octavo.models.config import ModelConfig
from octavo.models.config_to_hf import generation_config, hf_config
from octavo.models.parameters import FileTensor, Parameters
from octavo.models.safetensors_writer import NewTensor, write_safetensors
from octavo.quantization.base import float_bytes
from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType


def write_hf_folder(
    out: str | Path,
    checkpoint: Checkpoint,
    tensors: Iterable[NewTensor] | None = None,
    *,
    dtype: GGMLType = GGMLType.F32,
    quantization_config: Mapping[str, Any] | None = None,
    config: ModelConfig | None = None,
) -> None:
    """Write a folder of the model of an open checkpoint, where nothing is, or an empty folder.

    Args:
        tensors: the weights, by the names and in the layout that Hugging Face has; they are asked
            for one by one. None: those of the checkpoint, in ``dtype``.
        dtype: F32, F16 or BF16; what ``config.json`` says. Other ``tensors`` may have any.
        quantization_config: what ``config.json`` says of how ``tensors`` are quantized.
        config: of the model that ``tensors`` are of; None: the checkpoint's, in this layout.

    Raises:
        ModelError: the checkpoint cannot be read, or such a folder cannot say what it is.
        ConfigError: nothing can be written there. ValueError: as of ``write_safetensors``.
    """
    check_free(Path(out))
    parameters = Parameters(checkpoint)
    config = parameters.config if config is None else config
    described = hf_config(config, dtype.name, quantization_config)
    try:
        with NewFolder(out) as new:
            _write_json(new.folder / "config.json", described)
            generation = generation_config(config)
            _write_json(new.folder / "generation_config.json", generation)
            _write_tokenizer(new.folder, checkpoint.origin)
            chosen = float_tensors(parameters, dtype) if tensors is None else tensors
            write_safetensors(new.folder, chosen)
            new.publish()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error


def float_tensors(parameters: Parameters, dtype: GGMLType = GGMLType.F32) -> Iterator[NewTensor]:
    """Every tensor of a folder, rounded to ``dtype``, one of F32, F16 and BF16."""
    for tensor in parameters.tensors:
        yield float_tensor_of(parameters, tensor, dtype)


def float_tensor(parameters: Parameters, name: str, dtype: GGMLType = GGMLType.F32) -> NewTensor:
    """A parameter by its own name, of which no more than some rows are in memory at once."""
    tensor = FileTensor(name, (name,), parameters.shape(name))
    return float_tensor_of(parameters, tensor, dtype)


def float_tensor_of(parameters: Parameters, tensor: FileTensor, dtype: GGMLType) -> NewTensor:
    """A tensor of a folder, rounded to ``dtype``."""
    assert dtype in FLOAT_TYPES, dtype
    shape = tensor.shape
    if tensor.is_transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    if tensor.is_put_together:
        chunks = parameters.matrices(tensor)
    else:
        chunks = (parameters.rows(*piece) for piece in parameters.pieces(tensor))
    return NewTensor(tensor.name, dtype.name, shape, (float_bytes(each, dtype) for each in chunks))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, checkpoint: Checkpoint) -> None:
    if isinstance(checkpoint, GGUFFiles):
        from octavo.text.tokenizer_json import tokenizer_files as files_of_gguf

        for name, text in files_of_gguf(checkpoint.metadata, checkpoint.path).items():
            (folder / name).write_text(text, encoding="utf-8")
        return
    from octavo.text.folder_tokenizer import tokenizer_files

    for path in tokenizer_files(ModelFolder(checkpoint.path)):
        target = folder / path.relative_to(checkpoint.path)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
