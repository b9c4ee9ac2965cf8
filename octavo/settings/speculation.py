"""Settings of speculative decoding (``--speculative-config``), in vLLM's names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError
from octavo.core.sampling_params import MAX_DRAFT_TOKENS

METHODS = (
    *("auto", "ngram", "suffix", "draft_model", "early_exit"),
    *("medusa", "eagle", "recurrent", "mtp"),
)
METHOD_CHOICES = ("off", *METHODS, "redrafter")  # redrafter: the head of method recurrent
_ACCEPTANCES = ("exact", "typical")
# Other names of methods and fields.
_METHOD_ALIASES = {
    "eagle3": "eagle",
    "redrafter": "recurrent",
    "draft": "draft_model",
    "[ngram]": "ngram",
    "off": None,
}
_FIELD_ALIASES = {
    "rejection_sample_method": "acceptance",
    "max_matching_ngram_size": "prompt_lookup_max",
}
_NEEDS_MODEL = ("draft_model", "medusa", "eagle", "recurrent")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of speculative decoding. Answers do not depend on them, except with ``typical``.

    Args:
        method: the drafter. ``auto`` chooses by what has been accepted and what steps cost.
        model: a draft model, or a folder of trained heads.
        num_speculative_tokens: drafted at once for a request; None is the method's own choice.
        acceptance: ``exact`` accepts the tokens that the request would have sampled itself, with
            its own random numbers: the answer is that of plain decoding. ``typical`` accepts
            tokens that are likely enough, and changes the distribution.
        prompt_lookup_min, prompt_lookup_max: tokens of a match, of ``ngram``.
        suffix_decoding_max_tree_depth, suffix_decoding_max_cached_requests,
        suffix_decoding_max_spec_factor, suffix_decoding_min_token_prob: of ``suffix``: the longest
            match and draft, answers remembered, tokens drafted for each token that matches, and the
            least probability of a draft.
        min_probability: a chain of model drafts ends where the product of its probabilities falls
            below this; None is the method's own choice.
        exit_layer: of ``early_exit``: number of layers that draft; None is chosen by measuring.
        disable_by_batch_size: with so many requests in a step, or more, nothing is drafted.
        use_heterogeneous_vocab: the draft model may have another vocabulary.
        synthetic_acceptance_rates: for load tests: draft tokens are accepted at random, at these
            rates, by position, each given that those before it are; whatever ``acceptance`` says.
            ``auto`` then makes drafts that cost nothing. Answers are meaningless.

    Raises:
        ConfigError: names the field that is wrong.
    """

    method: str = "auto"
    model: str | None = None
    num_speculative_tokens: int | None = None
    acceptance: str = "exact"
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    min_probability: float | None = None
    exit_layer: int | None = None
    disable_by_batch_size: int | None = None
    use_heterogeneous_vocab: bool = False
    synthetic_acceptance_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        if self.acceptance == "rejection":
            raise ConfigError(
                "speculative_config: there is no acceptance 'rejection' any more: leave it out, "
                "for 'exact', which samples of the same distribution, and gives the very tokens of "
                "plain decoding besides (docs/speculation.md)"
            )
        _one_of("acceptance", self.acceptance, _ACCEPTANCES)
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"speculative_config: model must be a name, not {self.model!r}")
        if not isinstance(self.use_heterogeneous_vocab, bool):
            raise ConfigError(
                "speculative_config: use_heterogeneous_vocab must be true or false, not "
                f"{self.use_heterogeneous_vocab!r}"
            )
        if self.method in _NEEDS_MODEL and not self.model:
            raise ConfigError(f"speculative_config: method {self.method} needs a model")
        _in_range("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFT_TOKENS)
        _in_range("prompt_lookup_min", self.prompt_lookup_min, 1, 1024)
        _in_range("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 1024)
        _in_range("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1, 1024)
        _in_range(
            "suffix_decoding_max_cached_requests",
            self.suffix_decoding_max_cached_requests,
            0,
            10**7,
        )
        _in_range("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, 1e2)
        _in_range("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)
        _in_range("min_probability", self.min_probability, 0.0, 1.0)
        _in_range("exit_layer", self.exit_layer, 1, 10**6)
        _in_range("disable_by_batch_size", self.disable_by_batch_size, 1, 10**6)
        rates = self.synthetic_acceptance_rates
        if rates is not None and (not isinstance(rates, tuple) or not rates):
            raise ConfigError(
                "speculative_config: synthetic_acceptance_rates must be a list of rates, one for "
                f"each position, not {rates!r}"
            )
        for rate in rates or ():
            _in_range("synthetic_acceptance_rates", rate, 0.0, 1.0)

    @property
    def shares_blocks(self) -> bool:
        """True if drafts come from a model: its KV lies where the target's block table says, and
        there has to be one table."""
        return self.method not in ("auto", "ngram", "suffix") or self.model is not None

    @staticmethod
    def read(said: str) -> Mapping[str, Any]:
        """Return the object of a JSON text; ConfigError if it is none."""
        try:
            values = json.loads(said)
        except ValueError as error:
            raise ConfigError(f"speculative_config is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError('speculative_config must be an object such as {"method": "ngram"}')
        return values

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> SpeculativeConfig | None:
        """Return the settings of a user's fields; None where the method is ``off``.

        Raises:
            ConfigError: there is an unknown field, or a value is wrong.
        """
        if not isinstance(said, Mapping):
            raise ConfigError('speculative_config must be an object such as {"method": "ngram"}')
        known = {field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in said.items():
            target = _FIELD_ALIASES.get(name, name)
            if target not in known:
                raise ConfigError(
                    f"speculative_config has no field {name!r}; it has {', '.join(sorted(known))}"
                )
            if value is not None:
                values[target] = tuple(value) if isinstance(value, list) else value
        if "method" not in values and "model" in values:
            values["method"] = "draft_model"
        method = values.get("method")
        if isinstance(method, str) and method in _METHOD_ALIASES:
            values["method"] = _METHOD_ALIASES[method]
            if values["method"] is None:
                return None
        return cls(**values)


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"speculative_config: {name} must be one of {', '.join(choices)}: {value!r}"
        )


def _in_range(name: str, value: Any, least: float, most: float) -> None:
    """Raise ConfigError unless a value is None or a number in a range, an integer if the bounds
    are."""
    is_integer = isinstance(least, int)
    kinds = (int,) if is_integer else (int, float)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        raise ConfigError(
            f"speculative_config: {name} must be {'an integer' if is_integer else 'a number'} from "
            f"{least} to {most}, not {value!r}"
        )
