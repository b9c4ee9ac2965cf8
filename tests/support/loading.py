"""Models and configs of checkpoints, by their paths."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig
from octavo.models.loader import Progress, load_checkpoint
from octavo.models.registry import CausalLM


class LoadedModel(NamedTuple):
    model: CausalLM
    config: ModelConfig


def load_config(path: str | Path) -> ModelConfig:
    """The config of the checkpoint at ``path``; reads no weights. Errors as of load_model."""
    return open_checkpoint(path).config()


def load_model(
    path: str | Path,
    config: ModelConfig | None = None,
    *,
    progress: Progress | None = None,
) -> LoadedModel:
    """The model of a Hugging Face folder or a GGUF file; see ``load_checkpoint``."""
    checkpoint = open_checkpoint(path)
    config = config or checkpoint.config()
    model = load_checkpoint(checkpoint, config, progress=progress)
    return LoadedModel(model, config)
