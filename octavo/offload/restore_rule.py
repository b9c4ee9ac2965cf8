"""Decides whether reading KV blocks takes less time than computing them again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.core.executor import Probe
from octavo.core.host_kv_cache import AlwaysRestore, RestoreRule
from octavo.core.scheduler import SchedulerConfig
from octavo.cost.first_token import PredictedRates, StepRates, num_pairs
from octavo.cost.loaded_model import live_rank_model
from octavo.cost.step_cost import StepModel
from octavo.cost.this_machine import this_machine

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

_log = logging.getLogger("octavo")


class RestoreIfFaster:
    """A ``RestoreRule`` by the predicted time of steps: of each prompt token, and of each
    earlier token that it attends to."""

    def __init__(self, rates: StepRates):
        self._rates = rates

    def is_worth(self, start: int, num_tokens: int, seconds: float) -> bool:
        pairs = num_pairs(start + num_tokens) - num_pairs(start)
        computing = num_tokens * self._rates.prompt_token + pairs * self._rates.prompt_pair
        return seconds < computing


def predicted_rule(model: ModelConfig, probe: Probe, limits: SchedulerConfig) -> RestoreRule:
    """Return the rule for a model on this machine, whose limits are measured if they are not
    known yet. Where they cannot be, blocks are always read."""
    try:
        shape = live_rank_model(model, probe.matrices(), probe.kv_bytes_per_token)
        steps = StepModel.of(shape, this_machine())
    except ConfigError as error:
        _log.info("stored KV is always read, never computed again: %s", error)
        return AlwaysRestore()
    return RestoreIfFaster(
        PredictedRates(steps, limits.max_num_batched_tokens, limits.max_model_len)
    )
