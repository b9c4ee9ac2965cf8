"""Opens the model at a path, or its tokenizer alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo import hub
from octavo.base.gc_pause import no_collections
from octavo.base.model_files import is_engine_folder
from octavo.sources.checkpoint import CheckpointSource
from octavo.sources.source import ModelSource
from octavo.sources.transformers import TransformersSource, is_for_transformers

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


def open_source(path: Path, model_impl: str = "octavo") -> ModelSource:
    """Return the model at a path that ``hub.resolve`` gave.

    Args:
        model_impl: whose implementation runs it, as in ``EngineArgs``; "auto" is that of
            transformers for a family that octavo lacks, if transformers is installed.

    Raises:
        ModelError: it cannot be read.
    """
    if is_engine_folder(path):
        from octavo.sources.engine_folder.folder import EngineFolder

        return EngineFolder(path, notes_folder())
    if model_impl == "transformers" or (model_impl == "auto" and is_for_transformers(path)):
        return TransformersSource(path)
    return CheckpointSource(path)


def notes_folder() -> Path:
    """Return the folder for packed weights and digests; see ``kernels/cpu/file_digests.py``."""
    from octavo.kernels.cpu.file_digests import named_home

    return named_home() or hub.home() / "packed"


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a model, without its weights and without torch."""
    with no_collections():
        return open_source(path).tokenizer()
