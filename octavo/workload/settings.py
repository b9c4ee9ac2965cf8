"""Settings of requests and of their times, which server benchmarks and simulations share.

As with `EngineArgs`, the fields are the one owner of names, defaults and help texts. Names are
those of ``vllm bench serve``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.options import option


@dataclass(frozen=True)
class Workload:
    """Settings of the requests. Raises ConfigError for a value that is out of range."""

    dataset_name: str = option(
        "random",
        "random, prefix_repetition, sharegpt, jsonl (custom), or a trace: trace, mooncake, azure, "
        "burstgpt, …",
    )
    dataset_path: str | None = option(None, "its file")
    num_prompts: int | None = option(
        None, "requests to send; default: 1000, or all of a trace or JSONL"
    )
    seed: int = option(0, "of prompts and arrivals")
    input_len: int | None = option(None, "the same as --random-input-len")
    output_len: int | None = option(None, "tokens to ask for, whatever the dataset says")
    random_input_len: int = option(1024, "tokens of a random prompt")
    random_output_len: int = option(128, "tokens of its answer")
    random_range_ratio: float = option(0.0, "lengths vary by this share; below 1")
    random_length_cv: float = option(
        0.0, "lengths are log-normal instead, with so many times their mean as standard deviation"
    )
    random_prefix_len: int = option(0, "tokens that all random prompts begin with")
    prefix_repetition_prefix_len: int = option(256, "tokens of a shared beginning")
    prefix_repetition_suffix_len: int = option(256, "tokens behind it")
    prefix_repetition_num_prefixes: int = option(10, "different beginnings")
    prefix_repetition_output_len: int = option(128, "tokens of an answer")
    speedup: float = option(1.0, "replay a trace so many times as fast")
    max_input_len: int | None = option(None, "cut the prompts of a trace to so many tokens")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "max_input_len"):
            if getattr(self, name) is not None:
                at_least(1, self, name)


@dataclass(frozen=True)
class LoadSettings:
    """Settings of the times of sending. Raises ConfigError for a value that is out of range."""

    request_rate: float = option(
        math.inf, "requests a second, drawn as a Poisson process; inf sends as soon as it may"
    )
    burstiness: float = option(
        1.0, "shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, inf even"
    )
    max_concurrency: int | None = option(
        None, "requests in flight at most; without a rate, a closed loop of so many clients"
    )
    ramp_up_strategy: str | None = option(
        None, "let the rate change over the run", ("linear", "exponential")
    )
    ramp_up_start_rps: float | None = option(None, "rate at its beginning")
    ramp_up_end_rps: float | None = option(None, "rate at its end")
    duration: float | None = option(None, "seconds after which no more requests are sent")
    rescale_arrivals: bool = option(
        False, "stretch the arrivals to the rate exactly, as vLLM does; no Poisson process any more"
    )

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness", "duration"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value}")
        if self.max_concurrency is not None:
            at_least(1, self, "max_concurrency")
        edges = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None and edges != (None, None):
            raise ConfigError("ramp_up_start_rps and ramp_up_end_rps need a ramp_up_strategy")
        if self.ramp_up_strategy is not None and None in edges:
            raise ConfigError("a ramp needs ramp_up_start_rps and ramp_up_end_rps")
        if self.ramp_up_strategy is not None and math.isfinite(self.request_rate):
            raise ConfigError("give request_rate or a ramp, not both")

    @property
    def ramp_up(self) -> Mapping[str, Any] | None:
        """The settings of the ramp by vLLM's keys; None without one."""
        if self.ramp_up_strategy is None:
            return None
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        return {name: getattr(self, name) for name in names}


def at_least(least: int, settings: Any, *names: str) -> None:
    """Raise ConfigError, naming the setting, if one is less than ``least``."""
    for name in names:
        value = getattr(settings, name)
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
