"""A ``ModelSource`` for checkpoints, which are Hugging Face folders or GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.sources.source import Progress

if TYPE_CHECKING:
    from octavo.models.checkpoint import Checkpoint
    from octavo.models.config import ModelConfig
    from octavo.models.pooling import Pooling
    from octavo.runtime.capacity import RankSpec
    from octavo.runtime.rank import Rank
    from octavo.settings.engine import EngineArgs
    from octavo.text.tokenizer import Tokenizer


class CheckpointSource:
    """A checkpoint: a Hugging Face folder, or a GGUF file. Opened when it is first read."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        from octavo.models.checkpoint import open_checkpoint

        return open_checkpoint(self.path)

    @property
    def quantization(self) -> str | None:
        """Format of quantized weights in the files; None if they are not quantized."""
        return self.checkpoint.quantization

    def settings(self, args: EngineArgs) -> EngineArgs:
        """Return ``args`` unchanged; raises ConfigError if they name another format than the
        files have."""
        asked = args.quantization
        if asked is not None and asked != self.quantization:
            raise ConfigError(
                f"quantization {asked!r}: {self.path} is "
                f"{self.quantization or 'not quantized'}; leave the setting out, it is detected"
            )
        return args

    def config(self) -> ModelConfig:
        return self.checkpoint.config()

    def pooling(self, args: EngineArgs) -> Pooling | None:
        from octavo.models.pooling_files import pooling_of_checkpoint, with_method
        from octavo.models.registry import is_encoder

        encodes = is_encoder(self.config().architecture)
        if args.runner == "generate":
            if encodes:
                raise ConfigError(f"runner generate: {self.path} is an encoder, which only pools")
            return None
        asked = args.runner == "pooling" or args.pooling is not None
        found = pooling_of_checkpoint(self.checkpoint, is_encoder=encodes, is_asked=asked)
        return None if found is None else with_method(found, args.pooling)

    def tokenizer(self) -> Tokenizer:
        from octavo.text.folder_tokenizer import load_folder_tokenizer
        from octavo.text.gguf_tokenizer import load_gguf_tokenizer

        if self.path.is_dir():  # the folder may have a tokenizer alone
            return load_folder_tokenizer(self.path)
        metadata = self.gguf_metadata()
        assert metadata is not None, "a checkpoint is a folder, or of GGUF"
        return load_gguf_tokenizer(metadata, self.path)

    def weights_bytes(self) -> int:
        from octavo.models.footprint import matrices, weight_types

        config = self.config()
        kept = matrices(config, weight_types(self.checkpoint, config))
        return sum(matrix.num_bytes for matrix in kept)

    def load_rank(self, spec: RankSpec, progress: Progress | None = None) -> Rank:
        from octavo.runtime.rank import Rank

        return Rank.load(spec, self.checkpoint, progress)

    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """Return the metadata of a GGUF file; None for a folder."""
        from octavo.models.checkpoint import GGUFFiles

        return self.checkpoint.metadata if isinstance(self.checkpoint, GGUFFiles) else None
