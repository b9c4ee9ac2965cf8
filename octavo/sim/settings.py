"""Settings that only a simulation has, of hardware, replicas, outages and clients."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from octavo.base.errors import ConfigError
from octavo.base.options import option
from octavo.workload.settings import LoadSettings, at_least

# As in octavo.core.routing, which a test checks, and an oracle; --help need not import them.
ROUTER_NAMES = ("round_robin", "least_loaded", "prefix_aware", "prefix_oracle")
# Settings of an engine that a simulation has, too. The others choose what runs a model, or how.
ENGINE_SETTINGS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"),
    *("kv_cache_memory", "gpu_memory_utilization", "enable_prefix_caching"),
    *("enable_chunked_prefill", "itl_target_ms", "batching", "max_queued_requests"),
    *("max_queued_tokens", "speculative_config", "enforce_eager"),
)
_OUTAGE = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")
TRANSFER_GB_S = 50.0  # a network card of 400 Gb/s


@dataclass(frozen=True, slots=True)
class Outage:
    """A failure of a replica, which comes back with an empty cache. Its requests are sent again."""

    replica: int
    at_s: float
    lasts_s: float = math.inf

    @classmethod
    def read(cls, text: str) -> Outage:
        """Parse ``0@30``, or ``0@30+10`` for an outage of ten seconds; else ConfigError."""
        match = _OUTAGE.fullmatch(text)
        if match is None:
            raise ConfigError(f"fail: {text!r} is no outage: write 0@30, or 0@30+10 for 10 seconds")
        replica, at_s, lasts_s = match.groups()
        return cls(int(replica), float(at_s), math.inf if lasts_s is None else float(lasts_s))


@dataclass(frozen=True)
class FleetSettings:
    """The servers. Raises ConfigError for a value that is out of range."""

    hardware: str = option(
        "auto", "device by name, and how many in all: h100-sxm, a100-80gb:4; auto is this machine"
    )
    profile: str = option(
        "octavo",
        "engine whose memory rules, defaults and overheads it has: octavo, llama.cpp, or vllm, "
        "also by version as vllm-0.19",
    )
    tp: int | None = option(
        None,
        "devices that share each layer; default: all that --hardware counts for a replica, or what "
        "`octavo plan` chooses if nothing of the layout is given",
    )
    pp: int = option(1, "devices that share the layers, one after the other")
    ep: int = option(1, "devices that share the experts, of the tp x dp ones")
    dp: int = option(1, "copies of all but the experts, each with requests of its own")
    dp_attention: bool = option(
        False, "each of the tp processors attends for requests of its own, whose KV it alone has"
    )
    dtype: str | None = option(None, "type of what is not quantized; default: the model's")
    quantization: str | None = option(
        None, "of the weights: fp8, int4-g128, Q4_K_M, …; default: as the model is"
    )
    kv_cache_dtype: str | None = option(None, "type of the KV cache")
    replicas: int | None = option(
        None,
        "whole engines, each with devices of its own; default: as many as there are devices for",
    )
    router: str = option("least_loaded", "how the replica of a request is chosen", ROUTER_NAMES)
    prefill_replicas: int = option(
        0,
        "of the replicas, those that compute prompts; the others then compute answers, and short "
        "prompts",
    )
    max_local_prefill_length: int | None = option(
        None,
        "most tokens of a prompt that are computed where its answer is, what is cached there "
        "deducted; default: as many as take less time than their KV to get there",
    )
    transfer_gb_s: float | None = option(
        None, "GB/s at which the KV of a prompt goes from the ones to the others; default: 50"
    )
    fail: tuple[str, ...] = option(
        (), "a replica that fails, REPLICA@SECOND or REPLICA@SECOND+SECONDS; may be repeated"
    )

    def __post_init__(self) -> None:
        at_least(1, self, "pp", "ep", "dp")
        at_least(0, self, "prefill_replicas")
        for name in ("tp", "replicas"):
            if getattr(self, name) is not None:
                at_least(1, self, name)
        for name in ("transfer_gb_s", "max_local_prefill_length"):
            if getattr(self, name) is not None and not self.prefill_replicas:
                raise ConfigError(f"{name} means nothing without prefill_replicas")
        if self.max_local_prefill_length is not None:
            at_least(0, self, "max_local_prefill_length")
        if self.transfer_gb_s is not None and not 0 < self.transfer_gb_s < math.inf:
            raise ConfigError(f"transfer_gb_s must be above 0, not {self.transfer_gb_s}")
        self.outages  # noqa: B018 - checks them

    @property
    def has_layout(self) -> bool:
        """True if a setting says how devices share the work."""
        open_ones = self.tp is self.replicas is None and self.pp == self.ep == self.dp == 1
        return not open_ones or self.prefill_replicas > 0

    @property
    def outages(self) -> tuple[Outage, ...]:
        return tuple(map(Outage.read, self.fail))


@dataclass(frozen=True)
class ClientSettings:
    """The clients, beside the settings of a benchmark. Raises ConfigError for a wrong value."""

    trace: str | None = option(None, "file of requests, in any format that `octavo trace` reads")
    arrival: str | None = option(
        None,
        "how gaps between requests are distributed: poisson, constant, or gamma with --burstiness",
        ("poisson", "gamma", "constant"),
    )
    turns: int = option(1, "requests of a conversation: each goes on from all that was said before")
    think_time: float = option(0.0, "seconds between an answer and the next turn")
    patience: float | None = option(
        None, "seconds after which a client without a whole answer hangs up"
    )

    def __post_init__(self) -> None:
        at_least(1, self, "turns")
        if not 0 <= self.think_time < math.inf:
            raise ConfigError(f"think_time must be at least 0, not {self.think_time}")
        if self.think_time and self.turns == 1:
            raise ConfigError("think_time is between turns: give turns, too")
        if self.patience is not None and not self.patience > 0:
            raise ConfigError(f"patience must be above 0, not {self.patience}")

    def load(self, load: LoadSettings) -> LoadSettings:
        """Return the load with gaps as ``arrival`` says. ConfigError if that contradicts it."""
        if self.arrival is None:
            return load
        if load.ramp_up_strategy is None and load.request_rate == math.inf:
            raise ConfigError(f"arrival {self.arrival} needs a request_rate, or a ramp")
        shape = {"poisson": 1.0, "constant": math.inf}.get(self.arrival, load.burstiness)
        if load.burstiness not in (1.0, shape):
            raise ConfigError(
                f"arrival {self.arrival} and burstiness {load.burstiness} contradict each other"
            )
        return replace(load, burstiness=shape)
