"""Quantized weights of Hugging Face folders: where it is said how they are quantized, and which
tensors make them up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.base.model_files import ModelFolder
from octavo.quantization.ggml_types import FLOAT_TYPES

if TYPE_CHECKING:
    from octavo.models.safetensors import SafetensorsFile
    from octavo.quantization.formats.stored import WeightFormat

_FLOATS = {type.name for type in FLOAT_TYPES}  # which safetensors call so too

# Of activations, and of keys and values: octavo has them in formats of its own.
_OF_ACTIVATIONS = frozenset(
    f"{what}_{suffix}"
    for what in ("input", "output", "activation", "q", "k", "v", "kv", "prob")
    for suffix in ("scale", "global_scale", "zero_point", "scale_ub")
)

# Files that the first releases of AutoGPTQ and AutoAWQ wrote beside config.json, and the method
# that they had no need to name.
OWN_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def weight_format(folder: ModelFolder) -> WeightFormat | None:
    """The format of the weights in a folder, None where nothing says that they are quantized.

    Errors as of ``open_format``.
    """
    for path, config in _configs(folder):
        if config:
            from octavo.quantization.formats.registry import open_format  # where there is one

            return open_format(config, path)
    return None


def find_parts(
    format: WeightFormat, file_of: Mapping[str, SafetensorsFile]
) -> dict[str, dict[str, str]]:
    """Find the weights that consist of several tensors, each with its parts and their names.

    A weight that was left as one tensor of floats is none of these. ModelFileError if one is there
    twice, quantized and not.

    Args:
        file_of: the file of each tensor of the folder.
    """
    found: dict[str, dict[str, str]] = {}
    for tensor in file_of:
        part = format.part(tensor)
        if part is not None:
            found.setdefault(part[0], {})[part[1]] = tensor
    for name in list(found):
        tensors = list(found[name].values())
        if tensors == [name] and file_of[name].tensors[name][0] in _FLOATS:
            del found[name]
        elif name in file_of and name not in tensors:
            raise ModelFileError(
                file_of[name].path, f"it is also there quantized, as {tensors[0]}", field=name
            )
    return found


def is_of_activations(tensor: str) -> bool:
    """Whether a tensor of a quantized checkpoint is not of any weight, and not needed here."""
    return tensor.rpartition(".")[2] in _OF_ACTIVATIONS


def _configs(folder: ModelFolder) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The places that may have the quantization config; the first one counts."""
    path = folder.path / "config.json"
    fields = Fields(path, folder.read_json("config.json") or {})
    yield path, fields.table("quantization_config", {})
    yield path, _of_sparseml(fields.table("compression_config", {}))
    yield path, fields.section("text_config", {}).table("quantization_config", {})
    for name, method in OWN_CONFIGS.items():
        config = folder.read_json(name)
        if config:
            yield folder.path / name, {"quant_method": method, **config}


def _of_sparseml(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config that compressed-tensors had in its first releases, under another name."""
    if not config:
        return {}
    inner = config.get("quantization_config")
    inner = inner if isinstance(inner, Mapping) else {}
    return {"quant_method": "compressed-tensors", **config, **inner}
