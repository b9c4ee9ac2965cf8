"""Opens the drafter that a ``SpeculativeConfig`` names.

drafter = open_drafter(config, target)     loads what the method needs: a draft model, heads
drafter.kv_bytes_per_token                 KV memory that it takes for each token of the pool
drafter.start(limits)                      its proposer, once the KV pool has a size

With or without one, what the masks of requests force is drafted too (``masked_drafts.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.core.drafting import DraftProposer
from octavo.runtime.capacity import RankLimits
from octavo.runtime.verification import Acceptance
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.drafter import Drafter, TargetModel, TextDrafter

if TYPE_CHECKING:
    from octavo.speculation.ngram import NgramProposer
    from octavo.speculation.suffix import SuffixProposer


AUTO_TOKENS = 16  # the most of a draft, unless num_speculative_tokens is given


class AutoDrafter:
    """A drafter that chooses between matches in earlier text and ``model``, if there is one."""

    def __init__(self, config: SpeculativeConfig, model: Drafter | None = None):
        self._config = config
        self._model = model
        self.kv_bytes_per_token = 0 if model is None else model.kv_bytes_per_token

    def start(self, limits: RankLimits) -> DraftProposer:
        from octavo.speculation.auto import AutoProposer

        most = self._config.num_speculative_tokens or AUTO_TOKENS
        config = replace(self._config, num_speculative_tokens=most)
        model = None if self._model is None else self._model.start(limits)
        # ``ngram`` would mostly draft what ``suffix`` drafts, and both cost twice as much as one.
        return AutoProposer([_suffix(config)], model, most)


class MaskedDrafter:
    """A drafter whose proposer knows the masks of requests. Around none, it drafts what these force
    alone."""

    def __init__(self, drafter: Drafter | None):
        self._drafter = drafter
        self.kv_bytes_per_token = 0 if drafter is None else drafter.kv_bytes_per_token

    def start(self, limits: RankLimits) -> DraftProposer:
        from octavo.speculation.masked_drafts import MaskedDrafts

        return MaskedDrafts(None if self._drafter is None else self._drafter.start(limits))


class LimitedDrafter:
    """A drafter whose proposer is not asked while ``num_requests`` or more decode."""

    def __init__(self, drafter: Drafter, num_requests: int):
        self._drafter = drafter
        self._num_requests = num_requests

    @property
    def kv_bytes_per_token(self) -> int:
        return self._drafter.kv_bytes_per_token

    def start(self, limits: RankLimits) -> DraftProposer:
        from octavo.speculation.batch_limit import BatchLimit

        return BatchLimit(self._drafter.start(limits), self._num_requests)


def open_drafter(config: SpeculativeConfig | None, target: TargetModel) -> Drafter:
    """Open the drafter of ``config.method``, and load its model or heads; without settings, the one
    that drafts what masks force.

    Raises:
        ModelError: the draft model or heads cannot be found or read. ConfigError: they do not fit
            the target.
    """
    drafter = MaskedDrafter(None if config is None else _open(config, target))
    if config is None or config.disable_by_batch_size is None:
        return drafter
    return LimitedDrafter(drafter, config.disable_by_batch_size)


def check_pipelined(config: SpeculativeConfig) -> None:
    """ConfigError if drafts of ``config.method`` cannot be made beside the last layers alone, as
    the rank that samples has them in a pipeline."""
    if config.method == "early_exit":
        raise ConfigError(
            f"speculative_config: method {config.method} runs the first layers by themselves, and "
            "in a pipeline they are in another process: choose another method, or leave "
            "pipeline_parallel_size at 1"
        )


def _open(config: SpeculativeConfig, target: TargetModel) -> Drafter:
    # Imported here, so that starting an engine loads the modules of its own method alone.
    match config.method:
        case "auto" if config.synthetic_acceptance_rates is not None:
            from octavo.speculation.synthetic import SyntheticProposer

            length = config.num_speculative_tokens or len(config.synthetic_acceptance_rates)
            return TextDrafter(lambda limits: SyntheticProposer(length))
        case "auto":
            return AutoDrafter(config, _open_model(config, target))
        case "ngram":
            return TextDrafter(lambda limits: _ngram(config))
        case "suffix":
            return TextDrafter(lambda limits: _suffix(config))
        case "draft_model":
            from octavo.speculation.draft_model import DraftModel

            return DraftModel(config, target)
        case "early_exit":
            from octavo.speculation.early_exit import EarlyExit

            return EarlyExit(config, target)
    from octavo.speculation.heads import open_heads

    return open_heads(config, target)


def _ngram(config: SpeculativeConfig) -> NgramProposer:
    from octavo.speculation.ngram import NgramProposer

    return NgramProposer(
        config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens
    )


def _suffix(config: SpeculativeConfig) -> SuffixProposer:
    from octavo.speculation.suffix import SuffixProposer

    return SuffixProposer(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_cached_requests,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
        config.num_speculative_tokens,
    )


def _open_model(config: SpeculativeConfig, target: TargetModel) -> Drafter | None:
    """The drafter of ``config.model``, a folder of heads or a draft model; None without one."""
    if config.model is None:
        return None
    from octavo.speculation.heads import method_of

    return _open(replace(config, method=method_of(config.model)), target)


def acceptance_of(config: SpeculativeConfig | None) -> Acceptance | None:
    """The acceptance rule that drafts are verified by; None for the exact one."""
    if config is None or (config.acceptance, config.synthetic_acceptance_rates) == ("exact", None):
        return None
    from octavo.runtime.acceptance import SyntheticAcceptance, TypicalAcceptance

    if config.synthetic_acceptance_rates is not None:
        return SyntheticAcceptance(config.synthetic_acceptance_rates)
    return TypicalAcceptance()
