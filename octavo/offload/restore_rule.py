"""Decides whether reading KV blocks, or passing them on, takes less time than computing them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.core.disaggregation import PrefillRule, SlowerThanTransfer
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

# Bytes of KV a second from one process to another: four copies and two checksums.
TRANSFER_RATE = 500e6


class RestoreIfFaster:
    """A ``RestoreRule`` by the predicted time of steps: of each prompt token, and of each
    earlier token that it attends to."""

    def __init__(self, rates: StepRates):
        self._rates = rates

    def is_worth(self, start: int, num_tokens: int, seconds: float) -> bool:
        pairs = num_pairs(start + num_tokens) - num_pairs(start)
        computing = num_tokens * self._rates.prompt_token + pairs * self._rates.prompt_pair
        return seconds < computing


def predicted_rule(
    model: ModelConfig, probe: Probe, limits: SchedulerConfig, num_ranks: int = 1
) -> RestoreRule:
    """Return the rule for a model whose attention ``num_ranks`` share on this machine, whose
    limits are measured if they are not known yet. Where they cannot be, blocks are always read."""
    try:
        shape = live_rank_model(model, probe.matrices(), probe.kv_bytes_per_token, num_ranks)
        steps = StepModel.of(shape, this_machine())
    except ConfigError as error:
        _log.info("stored KV is always read, never computed again: %s", error)
        return AlwaysRestore()
    return RestoreIfFaster(
        PredictedRates(steps, limits.max_num_batched_tokens, limits.max_model_len)
    )


def predicted_prefill_rule(
    steps: StepModel, max_num_batched_tokens: int, max_model_len: int, token_seconds: float
) -> PrefillRule:
    """Return the rule by which prompts are computed apart where that takes longer than to pass
    their KV on, at ``token_seconds`` a token."""
    rates = PredictedRates(steps, max_num_batched_tokens, max_model_len)
    return SlowerThanTransfer(RestoreIfFaster(rates), token_seconds)
