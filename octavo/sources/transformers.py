"""A ``ModelSource`` for models that the transformers library runs, of families that octavo
lacks."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.base.model_files import ModelFolder
from octavo.base.optional_deps import has_transformers, need_transformers
from octavo.sources.source import Progress

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.models.pooling import Pooling
    from octavo.runtime.capacity import RankSpec
    from octavo.runtime.rank import Rank
    from octavo.settings.engine import EngineArgs
    from octavo.text.tokenizer import Tokenizer

_log = logging.getLogger("octavo")


def is_for_transformers(path: Path) -> bool:
    """Return whether transformers is installed and ``path`` a folder of a family that octavo
    lacks."""
    if not path.is_dir() or not has_transformers():
        return False
    from octavo.models.registry import architecture_of, is_known

    config = ModelFolder(path).read_json("config.json") or {}
    if not config.get("architectures"):
        return False
    name = architecture_of(config)
    return name is not None and not is_known(name)


class TransformersSource:
    """A Hugging Face folder whose model is transformers' own. Neither it nor torch is imported
    before a config is asked for.

    Raises:
        ConfigError: ``path`` is no such folder.
    """

    def __init__(self, path: Path):
        if not path.is_dir():
            raise ConfigError(
                f"model_impl transformers: {path} is no Hugging Face folder, and GGUF files are "
                "run by octavo alone"
            )
        self.path = path

    def settings(self, args: EngineArgs) -> EngineArgs:
        """Return ``args`` unchanged."""
        return args

    @cached_property
    def _config(self) -> Any:
        from octavo.models.unsupported_models import (
            check_by_transformers,
            check_generates,
            naming_features,
        )

        check_generates(self._json, self.path)
        check_by_transformers(self._json, self.path)
        need_transformers("model_impl transformers")
        from octavo.models.transformers_model import read_config

        with naming_features(*self._kinds):
            return read_config(self.path)

    @cached_property
    def _json(self) -> dict[str, Any]:
        return ModelFolder(self.path).read_json("config.json") or {}

    @property
    def _kinds(self) -> tuple[Any, ...]:
        from octavo.models.unsupported_models import kinds_of

        return kinds_of(self._json)

    def config(self) -> ModelConfig:
        generation = ModelFolder(self.path).read_json("generation_config.json")
        given = self._config
        from octavo.models.config_transformers import config_of
        from octavo.models.unsupported_models import naming_features

        with naming_features(*self._kinds):
            return config_of(given, generation or {}, self.path)

    def pooling(self, args: EngineArgs) -> Pooling | None:
        if args.runner == "pooling" or args.pooling is not None:
            raise ConfigError("runner pooling: models that transformers runs generate alone")
        return None

    def tokenizer(self) -> Tokenizer:
        from octavo.text.folder_tokenizer import load_folder_tokenizer

        return load_folder_tokenizer(self.path)

    def weights_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    def load_rank(self, spec: RankSpec, progress: Progress | None = None) -> Rank:
        """Load the model; no progress is reported, since transformers reads weights in one call."""
        config = self.config()
        import torch

        from octavo.models.config_transformers import with_attention
        from octavo.models.transformers_model import load
        from octavo.models.unsupported_models import naming_features
        from octavo.runtime.rank import Rank
        from octavo.runtime.transformers_backend import TransformersBackend

        _log.warning(
            "%s is run by transformers with octavo's scheduler and paged cache: several times "
            "slower than a family that octavo has kernels for",
            self.path,
        )
        device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
        with naming_features(*self._kinds):
            model = load(self.path, self._config, device, dtype)
            config = with_attention(config, model.seen, self.path)
        return Rank(spec, config, TransformersBackend(spec, model, config))
