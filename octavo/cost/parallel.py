"""Layouts of a model over devices: tensor, pipeline, expert and data parallel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from octavo.base.errors import ConfigError
from octavo.cost.shares import Scheme, Shares, shares


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of parallelism.

    Args:
        tp: devices that share each matrix. pp: groups of layers, one after the other.
        ep: devices that share the experts of a layer; they are those of the tp x dp group, so
            ``ep`` is 1 (experts are cut like other matrices) or divides ``tp * dp``.
        dp: copies of the rest of the model, each with requests of its own.
        scheme: how the tp devices share matrices, see `octavo.cost.shares`.

    Raises:
        ConfigError: a degree is not a positive integer, or ep does not divide tp * dp.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    scheme: Scheme = field(default="sum", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if (self.tp * self.dp) % self.ep:
            raise ConfigError(f"ep = {self.ep} does not divide tp x dp = {self.tp * self.dp}")

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
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp

    def with_tp(self, tp: int) -> Parallel:
        """The layout with each matrix on so many devices, and experts on all of them if they were
        split."""
        return replace(self, tp=tp, ep=1 if self.ep == 1 else tp * self.dp)

    def text(self, replicas: int = 1) -> str:
        """``tp 2, 4 replicas``, for people; nothing of one device."""
        degrees = ((name, getattr(self, name)) for name in ("tp", "pp", "ep", "dp"))
        said = [f"{name} {degree}" for name, degree in degrees if degree > 1]
        return ", ".join([*said, f"{replicas} replicas"] if replicas > 1 else said)


_shares = lru_cache(maxsize=256)(shares)
