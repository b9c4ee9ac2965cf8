"""A model's shape, by whatever someone has of it; no weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, ModelError, ModelFileError, UnsupportedModelError
from octavo.base.model_files import ModelFolder, begins_as_gguf, split_parts
from octavo.cost.catalogue import spec_of
from octavo.cost.file_weights import has_weights, other_params
from octavo.cost.model_spec import ModelSpec

_ENDINGS = (".json", ".gguf")
MODELOPT_FILE = "hf_quant_config.json"


def open_spec(text: str | Path) -> ModelSpec:
    """The shape of a model.

    Args:
        text: a ``config.json``, a model's folder, a GGUF file, the name of a model that has been
            fetched, which is taken as it is stored, or a name of the catalogue.

    Raises:
        ConfigError: there is no such file, and no such model in the catalogue.
        ModelError: a file is damaged, or of a kind of model that is not known.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return _of_folder(path)
    if path.is_file():
        return _of_gguf(path) if begins_as_gguf(path) else _of_config(path)
    if path.suffix in _ENDINGS or str(text).startswith((".", "/", "~")):
        raise ConfigError(f"{text}: there is no such file")
    from octavo.hub.store import find  # only for who asks by name: it takes a while to import

    stored = find(str(text))
    return spec_of(str(text)) if stored is None else open_spec(stored.path)


def _of_folder(path: Path) -> ModelSpec:
    config = ModelFolder(path).read_json("config.json")
    if config is None:
        raise ModelFileError(path, "the folder has no config.json")
    spec = _quantized_beside(_read(config, path), path)
    if not has_weights(path):
        return spec
    return replace(spec, source=path, other_params=other_params(path))


def _read(config: Mapping[str, Any], folder: Path) -> ModelSpec:
    """The spec of a model that octavo runs, which can be planned whatever else its config says."""
    # Families, and the modules that layers are made of, are only for models that are opened.
    from octavo.cost.spec_hf import spec_as_it_runs, spec_from_hf

    path = folder / "config.json"
    try:
        return spec_from_hf(config, path=path)
    except UnsupportedModelError as error:
        if not has_weights(folder):
            raise
        with suppress(ModelError):
            return spec_as_it_runs(config, path=path)
        raise error from None


def _of_config(path: Path) -> ModelSpec:
    from octavo.cost.spec_hf import spec_from_hf

    config = ModelFolder(path.parent).read_json(path.name)
    assert config is not None, path
    return _quantized_beside(spec_from_hf(config, path=path), path.parent)


def _quantized_beside(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with the quantization that ModelOpt writes to a file beside the config."""
    beside = None if spec.quantization else ModelFolder(folder).read_json(MODELOPT_FILE)
    if beside is None:
        return spec
    from octavo.cost.quantization_config import section_of_modelopt

    return replace(spec, quantization=section_of_modelopt(beside, folder / MODELOPT_FILE))


def _of_gguf(path: Path) -> ModelSpec:
    from octavo.cost.spec_gguf import spec_from_gguf
    from octavo.models.gguf import GGUFFile

    parts = [GGUFFile(path.with_name(name)) for name in split_parts(path.name)]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    spec = spec_from_gguf(parts[0].metadata, tensors, path=path)
    return replace(spec, source=path)
