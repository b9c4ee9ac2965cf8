"""A whole model as a GGUF file, from an open checkpoint of either kind.

    checkpoint = open_checkpoint("folder")
    export_gguf("model.gguf", checkpoint, lambda tensor: GGMLType.BF16)
    export_gguf("model.gguf", checkpoint, type_of, quantize_rows)

Names, keys and types are those that llama.cpp reads (``src/llama-arch.cpp``, ``gguf.md`` of ggml).
Who quantizes decides which type each matrix has, and makes the blocks; here is what is left:
vectors and routers stay F32, as llama.cpp wants them, rows of q and k are put in its order, the
matrices of all experts become one tensor, what makes keys and values of latents becomes two, and a
tensor is written in pieces of some rows, so that a model may be larger than memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError, UnsupportedModelError
from octavo.models.checkpoint import Checkpoint, GGUFFiles
from octavo.models.config import EMBEDDING, HEAD, ModelConfig
from octavo.models.config_gguf import end_ids_by_text
from octavo.models.config_to_gguf import check_gguf_config, gguf_config, rewritten_entries
from octavo.models.gguf_writer import TensorToWrite, write_gguf
from octavo.models.llama_cpp import unlike_in_llama_cpp
from octavo.models.parameters import FileTensor, Parameters
from octavo.models.pooling_files import gguf_pooling_type, pooling_of_checkpoint
from octavo.models.registry import family_of, gguf_architecture, is_encoder
from octavo.quantization.base import float_bytes
from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType, block_shape, row_bytes

_log = logging.getLogger("octavo")

QUANTIZATION_VERSION = 2  # of ggml's blocks, since 2023
# Of how a file was cut and aligned, which another one is not.
_OF_THE_FILE = ("split.", "general.alignment")
_MAX_NAME = 63  # bytes, with which ggml's 64 end in a zero

# ``general.file_type`` (``llama_ftype``) of the mix that has most weights in a type.
_FILE_TYPES = {
    GGMLType.F32: 0,
    GGMLType.F16: 1,
    GGMLType.Q4_0: 2,
    GGMLType.Q4_1: 3,
    GGMLType.Q8_0: 7,
    GGMLType.Q5_0: 8,
    GGMLType.Q5_1: 9,
    GGMLType.Q2_K: 10,
    GGMLType.Q3_K: 12,
    GGMLType.Q4_K: 15,
    GGMLType.Q5_K: 17,
    GGMLType.Q6_K: 18,
    GGMLType.IQ4_NL: 25,
    GGMLType.IQ4_XS: 30,
    GGMLType.BF16: 32,
    GGMLType.MXFP4: 38,
}


@dataclass(frozen=True, slots=True)
class ExportedMatrix:
    """A matrix of a file to be, for who chooses its type.

    ``name``: in the file; ``parameter``: the name that Hugging Face has, of the first one where it
    is several. ``type``: that of a copy: in the checkpoint, or F16 where that has blocks and the
    file has the values in other places; None where the checkpoint has another format.
    """

    name: str
    parameter: str
    shape: tuple[int, int]
    type: GGMLType | None


TypeOf = Callable[[ExportedMatrix], GGMLType]

Encode = Callable[[GGMLType, np.ndarray, str], np.ndarray]
"""(type, rows, parameter) to blocks: float32 [n, K] to uint8 [n, bytes of a row]. The rows of a
matrix come in order, some thousands at a time; those of q and k in the order of the file."""


def export_gguf(
    out: str | Path,
    checkpoint: Checkpoint,
    type_of: TypeOf,
    encode: Encode | None = None,
    *,
    file_type: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a GGUF file, atomically; warn of what llama.cpp would do otherwise with it.

    Args:
        type_of: which type a matrix gets. One that it has already is copied, bit for bit.
        encode: makes blocks; F32, F16 and BF16 need none.
        file_type: ``general.file_type``; None: that of the type of most weights between embedding
            and head, or that of the file that is copied.
        metadata: more entries, or others; as ``write_gguf`` takes them.

    Raises:
        ModelError: the checkpoint cannot be read, or a GGUF file cannot say what it is.
        ConfigError: a matrix cannot have the type that ``type_of`` gives it; nothing can be written
            there.
    """
    parameters = Parameters(checkpoint, layout="gguf")
    types = _choose_types(parameters, type_of, encode)
    tensors = [*_divisors(parameters), *_tensors(parameters, types, encode)]
    entries = _metadata(parameters)
    is_copy = all(_stored_type(parameters, tensor) == type for tensor, type in types.items())
    if file_type is not None:
        entries["general.file_type"] = file_type
    elif not (is_copy and "general.file_type" in entries):
        entries["general.file_type"] = _file_type(types)
    entries |= {"general.quantization_version": QUANTIZATION_VERSION, **(metadata or {})}
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    check_gguf_config(parameters.config, entries, shapes)
    for difference in unlike_in_llama_cpp(parameters.config):
        _log.warning("%s: llama.cpp will not run this file as octavo does: %s", out, difference)
    try:
        write_gguf(Path(out), entries, tensors)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error


# -- metadata -------------------------------------------------------------------------------------


def _metadata(parameters: Parameters) -> dict[str, Any]:
    """A GGUF file's own, or what a folder's config and tokenizer say."""
    checkpoint = parameters.checkpoint.origin
    if isinstance(checkpoint, GGUFFiles):
        kept = {k: v for k, v in checkpoint.metadata.items() if not k.startswith(_OF_THE_FILE)}
        return kept | rewritten_entries(parameters.config)
    from octavo.text.tokenizer_metadata import tokenizer_metadata

    config = parameters.config
    tokenizer = tokenizer_metadata(checkpoint.path, config.vocab_size)
    pooling = _pooling_entry(checkpoint, config)
    return {**gguf_config(config), **pooling, **tokenizer, **_token_ids(config, tokenizer)}


def _pooling_entry(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, int]:
    """Metadata on how a folder's model pools, if it does."""
    pooling = pooling_of_checkpoint(checkpoint, is_encoder=is_encoder(config.architecture))
    if pooling is None:
        return {}
    return {f"{gguf_architecture(config)}.pooling_type": gguf_pooling_type(pooling, config.name)}


def _token_ids(config: ModelConfig, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Tokenizer metadata in which the model's config decides on begin and end of text."""
    prefix = "tokenizer.ggml."
    ids = {} if config.bos_token_id is None else {f"{prefix}bos_token_id": config.bos_token_id}
    found = end_ids_by_text(tokenizer[f"{prefix}tokens"], tokenizer[f"{prefix}token_type"])
    ends = list(config.eos_token_ids)
    first = tokenizer.get(f"{prefix}eos_token_id")
    if ends and first not in ends:
        first = ends[0]
        ids[f"{prefix}eos_token_id"] = first
    further = [i for i in ends if i != first and i not in found]
    for name, token_id in zip(("eot", "eom"), further, strict=False):  # for no more is there a key
        ids[f"{prefix}{name}_token_id"] = token_id
    return ids


def _file_type(types: Mapping[FileTensor, GGMLType]) -> int:
    counts: Counter[GGMLType] = Counter()
    for tensor, type in types.items():
        if tensor.parts[0] not in (EMBEDDING, HEAD):  # which every mix has in a type of their own
            counts[type] += prod(tensor.shape)
    most = counts.most_common(1)[0][0]
    if most not in _FILE_TYPES:
        raise ConfigError(f"no file_type is known of {most.name}: give one")
    return _FILE_TYPES[most]


# -- tensors --------------------------------------------------------------------------------------


def _choose_types(
    parameters: Parameters, type_of: TypeOf, encode: Encode | None
) -> dict[FileTensor, GGMLType]:
    """The type of each matrix; ConfigError for one that it cannot have."""
    types = {}
    for tensor in parameters.tensors:
        first = tensor.parts[0]
        if len(parameters.shape(first)) < 2 or first in parameters.exact:
            continue
        rows, columns = tensor.shape[-2:]
        stored = _stored_type(parameters, tensor)
        matrix = ExportedMatrix(_checked(tensor.name), tensor.parts[0], (rows, columns), stored)
        type = types[tensor] = type_of(matrix)
        if columns % block_shape(type)[0]:
            raise ConfigError(
                f"{matrix.name}: rows of {columns} values cannot be {type.name}, which has blocks "
                f"of {block_shape(type)[0]}"
            )
        if encode is None and type not in (*FLOAT_TYPES, stored):
            raise ConfigError(f"{matrix.name}: nothing was given that makes {type.name} of it")
    return types


def _stored_type(parameters: Parameters, tensor: FileTensor) -> GGMLType | None:
    """The GGUF type that all parts of a weight have, or that of the floats their blocks become;
    None if they have several, or none of GGUF's."""
    found = {parameters.type(part) for part in tensor.parts}
    type = found.pop() if len(found) == 1 else None
    is_taken_apart = tensor.write is not None and type not in (*FLOAT_TYPES, None)
    return GGMLType.F16 if is_taken_apart else type


def _tensors(
    parameters: Parameters, types: Mapping[FileTensor, GGMLType], encode: Encode | None
) -> Iterator[TensorToWrite]:
    for tensor in parameters.tensors:
        type = types.get(tensor, GGMLType.F32)
        chunks = _chunks(parameters, tensor, type, encode)
        yield TensorToWrite(_checked(tensor.name), tensor.shape, type, chunks)


def _chunks(
    parameters: Parameters, tensor: FileTensor, type: GGMLType, encode: Encode | None
) -> Iterator[np.ndarray]:
    """The bytes of a tensor, some rows at a time, or what is put together."""
    if tensor.is_put_together:
        yield from _put_together(parameters, tensor, type, encode)
        return
    for part, start, stop in parameters.pieces(tensor):
        yield _encoded(parameters, part, type, encode, start, stop)


def _put_together(
    parameters: Parameters, tensor: FileTensor, type: GGMLType, encode: Encode | None
) -> Iterator[np.ndarray]:
    is_type = _stored_type(parameters, tensor) == type
    stored = parameters.stored_whole(tensor) if is_type else None
    if stored is not None:
        yield stored
    else:
        for matrix in parameters.matrices(tensor):
            yield _blocks(type, matrix, encode, tensor.parts[0])


def _encoded(
    parameters: Parameters,
    name: str,
    type: GGMLType,
    encode: Encode | None,
    start: int,
    stop: int,
) -> np.ndarray:
    if parameters.type(name) == type:
        stored = parameters.stored_rows(name, start, stop)
        if stored is not None:
            return stored
    return _blocks(type, parameters.rows(name, start, stop), encode, name)


def _blocks(type: GGMLType, rows: np.ndarray, encode: Encode | None, name: str) -> np.ndarray:
    if type in FLOAT_TYPES:
        return float_bytes(rows, type)
    assert encode is not None
    rows = rows.reshape(-1, rows.shape[-1])  # of all heads
    blocks = encode(type, rows, name)
    assert blocks.dtype == np.uint8, blocks.dtype
    assert blocks.shape == (len(rows), row_bytes(type, rows.shape[1])), (name, blocks.shape)
    return blocks


def _divisors(parameters: Parameters) -> Iterator[TensorToWrite]:
    names = family_of(parameters.config.architecture).names_to_write(parameters.config)
    for name, values in parameters.divisors.items():
        array = values.astype("<f4")
        yield TensorToWrite(_checked(names.tensor(name)), array.shape, GGMLType.F32, [array])


def _checked(name: str) -> str:
    if len(name.encode()) > _MAX_NAME:
        raise UnsupportedModelError(f"{name}: names in GGUF files have {_MAX_NAME} bytes at most")
    return name
