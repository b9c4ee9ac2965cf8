"""Layouts of a model over devices: tensor, pipeline, expert and data parallel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from octavo.base.errors import ConfigError
from octavo.cost.shares import WHOLE, Scheme, Shares, shares


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of parallelism.

    Args:
        tp: devices that share each matrix. pp: groups of layers, one after the other.
        ep: devices that share the experts of a layer; they are those of the tp x dp group, so
            ``ep`` is 1 (experts are cut like other matrices) or divides ``tp * dp``.
        dp: copies of the rest of the model, each with requests of its own.
        scheme: how the tp devices share matrices, see `octavo.cost.shares`.
        dp_attention: each of the tp devices computes the attention of requests of its own, with
            all of its weights, and has the KV of these alone.

    Raises:
        ConfigError: a degree is not a positive integer, or ep does not divide tp * dp; attention
            of one device's own requests is asked for where there is one device, or a pipeline.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    scheme: Scheme = field(default="sum", kw_only=True)
    dp_attention: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if (self.tp * self.dp) % self.ep:
            raise ConfigError(f"ep = {self.ep} does not divide tp x dp = {self.tp * self.dp}")
        if self.dp_attention and (self.tp == 1 or self.pp > 1):
            raise ConfigError(
                f"dp_attention is of devices that share each layer of the whole model: choose "
                f"tp > 1 and pp = 1, not {self.tp} and {self.pp}"
            )

    def on(self, kind: str) -> Parallel:
        """The layout as devices of a kind (``Device.kind``) have it: processors share matrices by
        `gather`, others by `sum`. `octavo.cost.rank.on_devices` knows the model and the engine."""
        scheme: Scheme = "gather" if kind == "cpu" and self.tp > 1 else "sum"
        return replace(self, scheme=scheme)

    @property
    def shares(self) -> Shares:
        """The shares of the fullest of the tp devices."""
        return _shares(self.tp, self.scheme)

    @property
    def attention_shares(self) -> Shares:
        """The same of attention, which each device has whole where its requests are its own."""
        return WHOLE if self.dp_attention else self.shares

    @property
    def num_pools(self) -> int:
        """KV pools of the tp devices, each of other tokens; all have the same tokens in one."""
        return self.tp if self.dp_attention else 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp

    def with_tp(self, tp: int) -> Parallel:
        """The layout with each matrix on so many devices, and experts on all of them if they were
        split."""
        ep = 1 if self.ep == 1 else tp * self.dp
        return replace(self, tp=tp, ep=ep, dp_attention=self.dp_attention and tp > 1)

    def text(self, replicas: int = 1) -> str:
        """``tp 2, 4 replicas``, for people; nothing of one device."""
        degrees = ((name, getattr(self, name)) for name in ("tp", "pp", "ep", "dp"))
        said = [f"{name} {degree}" for name, degree in degrees if degree > 1]
        said += ["dp attention"] if self.dp_attention else []
        return ", ".join([*said, f"{replicas} replicas"] if replicas > 1 else said)


_shares = lru_cache(maxsize=256)(shares)
