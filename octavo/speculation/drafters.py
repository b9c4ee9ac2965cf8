"""From what a user says to who is asked for drafts.

drafter = open_drafter(config, target)     loads what it needs: a draft model, heads
drafter.kv_bytes_per_token                 what it wants of the memory for KV
drafter.start(limits)                      the proposer, once the pool has a size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.core.drafting import DraftProposer
from octavo.errors import ConfigError
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.speculation.config import SpeculativeConfig

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.runtime.rank import Rank
    from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """The model whose tokens are guessed: loaded, and not started yet."""

    rank: Rank
    spec: RankSpec
    model_config: ModelConfig
    tokenizer: Tokenizer


class Drafter(Protocol):
    """Who makes drafts, before there is a KV pool."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Of KV of its own, for each token of the target's pool."""
        ...

    def start(self, limits: RankLimits) -> DraftProposer:
        """Make the proposer. The target's rank has been started, with the same limits."""
        ...


class DraftFree:
    """A drafter that has only its proposer: it looks at tokens, and at no model."""

    kv_bytes_per_token = 0

    def __init__(self, make: Callable[[RankLimits], DraftProposer]):
        self._make = make

    def start(self, limits: RankLimits) -> DraftProposer:
        return self._make(limits)


def open_drafter(config: SpeculativeConfig, target: Target) -> Drafter:
    """Who guesses as ``config`` says.

    Raises:
        ModelError: a draft cannot be found or read. ConfigError: it does not fit the target.
    """
    # Each is imported where it is used: a start pays for no other.
    match config.method:
        case "medusa" | "eagle" | "mtp" | "recurrent":
            from octavo.speculation.heads import open_heads

            return open_heads(config, target)
        case _:
            raise ConfigError(f"speculative_config: method {config.method} is not there yet")
