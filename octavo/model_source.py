"""What a model argument leads to, once it is a path, and what can be asked of it.

A checkpoint is here; an engine folder is the other kind (`octavo.engine_folder.folder`).
`octavo.open_model.open_source` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.base.errors import ConfigError

if TYPE_CHECKING:
    from octavo.models.checkpoint import Checkpoint
    from octavo.models.config import ModelConfig
    from octavo.runtime.capacity import RankSpec
    from octavo.runtime.rank import Rank
    from octavo.settings.engine import EngineArgs
    from octavo.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]


class ModelSource(Protocol):
    """A model that can be started. What is wrong with its files is a ModelError."""

    @property
    def path(self) -> Path: ...

    def settings(self, args: EngineArgs) -> EngineArgs:
        """The settings to start it with; ConfigError if ``args`` ask for what it cannot be."""
        ...

    def config(self) -> ModelConfig: ...

    def tokenizer(self) -> Tokenizer: ...

    def load_rank(self, spec: RankSpec, progress: Progress | None = None) -> Rank:
        """A rank that runs it. ConfigError if it does not fit ``spec``, or this machine."""
        ...


class CheckpointSource:
    """A checkpoint: a Hugging Face folder, or a GGUF file. Opened when it is first looked into."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        from octavo.models.checkpoint import open_checkpoint

        return open_checkpoint(self.path)

    @property
    def quantization(self) -> str | None:
        """How weights are quantized in the files, if they are."""
        return self.checkpoint.quantization

    def settings(self, args: EngineArgs) -> EngineArgs:
        """As they are. The format is read from the files; a word of the user's can only agree."""
        asked = args.quantization
        if asked is not None and asked != self.quantization:
            raise ConfigError(
                f"quantization {asked!r}: {self.path} is "
                f"{self.quantization or 'not quantized'}; leave the setting out, it is detected"
            )
        return args

    def config(self) -> ModelConfig:
        return self.checkpoint.config()

    def tokenizer(self) -> Tokenizer:
        from octavo.text.tokenizer import Tokenizer

        if self.path.is_dir():  # which may have no more than that
            return Tokenizer.from_folder(self.path)
        metadata = self.gguf_metadata()
        assert metadata is not None, "a checkpoint is a folder, or of GGUF"
        return Tokenizer.from_gguf(metadata, self.path)

    def load_rank(self, spec: RankSpec, progress: Progress | None = None) -> Rank:
        from octavo.runtime.rank import Rank

        return Rank.load(spec, self.checkpoint, progress)

    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """Of a GGUF file, None of anything else."""
        from octavo.models.checkpoint import GGUFFiles

        return self.checkpoint.metadata if isinstance(self.checkpoint, GGUFFiles) else None
