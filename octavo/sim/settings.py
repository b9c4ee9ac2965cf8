"""The settings of a simulation that no real run has: which hardware, how many replicas, what goes
wrong, who the clients are. The rest are those of the engine, the workload and the load."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from octavo.errors import ConfigError
from octavo.options import option
from octavo.sim.fleet import Outage
from octavo.sim.router import ROUTERS
from octavo.workload.settings import LoadSettings, at_least

TRANSFER_GB_S = 50.0  # a network card of 400 Gb/s
_OUTAGE = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class FleetSettings:
    """What serves. Raises ConfigError for a value that is out of range."""

    hardware: str = option(
        "auto", "device by name, and how many in all: h100-sxm, a100-80gb:4; auto is this machine"
    )
    profile: str = option(
        "octavo",
        "engine whose memory rules, defaults and overheads it has: octavo, vllm, llama.cpp",
    )
    tp: int | None = option(
        None, "devices that share each layer; default: all that --hardware counts for a replica"
    )
    pp: int = option(1, "devices that share the layers, one after the other")
    ep: int = option(1, "devices that share the experts, of the tp ones")
    dtype: str | None = option(None, "type of what is not quantized; default: the model's")
    quantization: str | None = option(
        None, "of the weights: fp8, int4-g128, Q4_K_M, …; default: as the model is"
    )
    kv_cache_dtype: str | None = option(None, "type of cached keys and values")
    replicas: int = option(1, "whole engines, each with devices of its own")
    router: str = option("least_loaded", "who gets a request", tuple(ROUTERS))
    prefill_replicas: int = option(
        0, "of the replicas, those that compute prompts only; the others then compute answers only"
    )
    transfer_gb_s: float | None = option(
        None, "GB/s at which the KV of a prompt goes from the ones to the others; default: 50"
    )
    fail: tuple[str, ...] = option(
        (), "a replica that fails, REPLICA@SECOND or REPLICA@SECOND+SECONDS; may be repeated"
    )

    def __post_init__(self) -> None:
        at_least(1, self, "pp", "ep", "replicas")
        at_least(0, self, "prefill_replicas")
        if self.tp is not None:
            at_least(1, self, "tp")
        if self.transfer_gb_s is not None:
            if not self.prefill_replicas:
                raise ConfigError("transfer_gb_s means nothing without prefill_replicas")
            if not 0 < self.transfer_gb_s < math.inf:
                raise ConfigError(f"transfer_gb_s must be above 0, not {self.transfer_gb_s}")
        self.outages  # noqa: B018 - checks them

    @property
    def outages(self) -> tuple[Outage, ...]:
        return tuple(map(_outage, self.fail))


@dataclass(frozen=True)
class ClientSettings:
    """Who asks, beside what a benchmark says of it. Raises ConfigError for a wrong value."""

    trace: str | None = option(None, "file of requests, in any format that `octavo trace` reads")
    arrival: str | None = option(
        None,
        "how gaps between requests are distributed: poisson, constant, or gamma with --burstiness",
        ("poisson", "gamma", "constant"),
    )
    turns: int = option(1, "requests of a conversation: each goes on from all that was said before")
    think_time: float = option(0.0, "seconds between an answer and the next turn")
    patience: float | None = option(
        None, "seconds after which a client hangs up who has no whole answer"
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
        """The load with gaps as ``arrival`` says. ConfigError if that contradicts it."""
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


def _outage(text: str) -> Outage:
    match = _OUTAGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"fail: {text!r} is no outage: write 0@30, or 0@30+10 for ten seconds")
    replica, at_s, lasts_s = match.groups()
    return Outage(int(replica), float(at_s), math.inf if lasts_s is None else float(lasts_s))
