"""The interface ``ModelSource`` of a model that can be loaded, from any kind of files.

`octavo.sources.open.open_source` makes the one that a path asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.models.pooling import Pooling
    from octavo.runtime.capacity import RankSpec
    from octavo.runtime.rank import Rank
    from octavo.settings.engine import EngineArgs
    from octavo.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]


class ModelSource(Protocol):
    """A model that can be loaded. Errors in its files are a ModelError."""

    @property
    def path(self) -> Path: ...

    def settings(self, args: EngineArgs) -> EngineArgs:
        """Return the settings to load it with; ConfigError if ``args`` ask for what it cannot
        be."""
        ...

    def config(self) -> ModelConfig: ...

    def pooling(self, args: EngineArgs) -> Pooling | None:
        """Return how its hidden states become vectors, by its files and the settings; None if it
        generates. ConfigError if ``args`` ask for what it cannot be."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def weights_bytes(self) -> int:
        """Return the bytes of the weights that a step reads, as kernels have them in memory; a part
        of the files may do to know it."""
        ...

    def load_rank(self, spec: RankSpec, progress: Progress | None = None) -> Rank:
        """Return a rank that runs it. ConfigError if it does not fit ``spec``, or this machine."""
        ...
