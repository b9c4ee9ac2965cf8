"""The interface of a drafter, and the target model that it drafts for.

A drafter is opened before the KV pool exists, says how much KV memory it needs, and becomes a
``DraftProposer`` once the pool has a size (``speculation/drafters.py`` opens one by its method).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.core.drafting import DraftProposer
from octavo.runtime.capacity import RankLimits, RankSpec

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.runtime.rank import Rank
    from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that verifies drafts: loaded, and not started yet."""

    rank: Rank
    spec: RankSpec
    model_config: ModelConfig
    tokenizer: Tokenizer


class Drafter(Protocol):
    """Loads what drafting needs, and makes the proposer that the engine asks for drafts."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the drafter's own KV cache for each token of the target's pool."""
        ...

    def start(self, limits: RankLimits) -> DraftProposer:
        """Make the proposer. The target's rank has been started with the same limits."""
        ...


class TextDrafter:
    """A drafter without a model: its proposer reads only the tokens of requests."""

    kv_bytes_per_token = 0

    def __init__(self, make: Callable[[RankLimits], DraftProposer]):
        self._make = make

    def start(self, limits: RankLimits) -> DraftProposer:
        return self._make(limits)
