"""Times of chunks of prompts in a stage of an engine's pipeline, as this machine is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.core.prompt_chunks import StageSeconds

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.runtime.rank import Rank


def stage_seconds(rank: Rank, config: ModelConfig, device: str) -> StageSeconds | None:
    """Return the times of the stage of a loaded rank; None where nothing is known of the machine,
    and where there is one stage.

    Stages are taken to be alike, and nothing is measured.
    """
    if rank.depth == 1 or rank.feeds_tokens:
        return None
    # Imported here, because one rank needs none of it.
    from octavo.cost.loaded_model import live_rank_model
    from octavo.cost.step_facts import StepFacts
    from octavo.cost.this_machine import device_of_engine

    probe = rank.probe()
    sizes = probe.matrices(), probe.kv_bytes_per_token
    model = live_rank_model(config, *sizes, rank.spec.num_ranks)
    try:
        steps = StepFacts(model, device_of_engine(device)).step_model()
    except ConfigError:
        return None
    return steps.chunk_seconds
