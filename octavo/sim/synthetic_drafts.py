"""Speculation without a model: drafts that cost nothing, accepted at given rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.core.drafting import DraftProposer
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.synthetic import SyntheticProposer

if TYPE_CHECKING:
    from octavo.runtime.acceptance import SyntheticAcceptance


def check_drafts(config: SpeculativeConfig | None) -> None:
    """Raise a ConfigError if a simulation cannot tell how often drafts are right."""
    if config is not None:
        acceptance(config)


def acceptance(config: SpeculativeConfig) -> SyntheticAcceptance:
    """Which drafted tokens are right: by coins that depend on the request and the place alone."""
    rates = config.synthetic_acceptance_rates
    if config.method != "auto" or rates is None:
        raise ConfigError(
            "a simulation has no text to guess from: say how often guesses are right, as in "
            "--speculative-config '{\"synthetic_acceptance_rates\": [0.8, 0.7, 0.6]}'"
        )
    from octavo.runtime.acceptance import (
        SyntheticAcceptance,  # and numpy, which a start needs not wait for
    )

    return SyntheticAcceptance(rates)


def draft_proposer(config: SpeculativeConfig) -> DraftProposer:
    rates = acceptance(config).rates
    return SyntheticProposer(config.num_speculative_tokens or len(rates))
