"""Rotary position embeddings as a module: a table of cosines and sines that grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from octavo.layers.context import ForwardContext
from octavo.layers.module import Module
from octavo.layers.parameter import Parameter
from octavo.layers.rope_config import RopeConfig

if TYPE_CHECKING:
    import numpy as np

# Tables grow by whole pieces, so that decoding does not extend them at every step, and by a share
# of their size, since growing copies them.
_GROWTH = 1024
_GROWTH_SHARE = 8


class RotaryEmbedding(Module):
    """Cosines and sines of positions, computed as far as steps have needed them."""

    def __init__(self, config: RopeConfig):
        self.config = config
        half, is_longrope = config.rotary_dim // 2, config.scaling == "longrope"
        self.freq_factors = self.short_factors = self.long_factors = None
        if config.has_freq_factors and is_longrope:
            self.short_factors = Parameter(half, exact=True)
            self.long_factors = Parameter(half, exact=True)
        elif config.has_freq_factors:
            self.freq_factors = Parameter(half, exact=True)
        self._table: np.ndarray | None = None

    def forward(self, ctx: ForwardContext) -> Any:
        """Return the table for a step, see :meth:`table`."""
        return ctx.rope_table(self.table, self.config.rotary_dim)

    def with_parameters(self, change: Callable[[Parameter], Parameter]) -> Self:
        return self  # angles are computed here, wherever the model runs

    def table(self, num_positions: int) -> np.ndarray:
        """Table of cosines, then sines, of each position: float32 [P, rotary_dim], P >=
        ``num_positions``.

        A new array replaces the table when it grows; the bits of earlier rows stay the same.
        """
        known = 0 if self._table is None else len(self._table)
        if self._table is None or known < num_positions:
            self._table = self._extended(max(num_positions, known + known // _GROWTH_SHARE))
        return self._table

    def _extended(self, needed: int) -> np.ndarray:
        import numpy as np  # a model is made without it, see `octavo.cost.spec_of_config`

        from octavo.layers.rope_angles import cos_sin

        known = [] if self._table is None else [self._table]
        size = -(-needed // _GROWTH) * _GROWTH
        positions = np.arange(sum(map(len, known)), size)
        factors = None if self.freq_factors is None else self.freq_factors.value
        return np.concatenate([*known, cos_sin(self._with_factors(), positions, factors)])

    def _with_factors(self) -> RopeConfig:
        """The config, with longrope's divisors where the checkpoint has them as tensors."""
        if self.short_factors is None or self.long_factors is None:
            return self.config
        short, long = (tuple(p.value.tolist()) for p in (self.short_factors, self.long_factors))
        return replace(self.config, short_factor=short, long_factor=long)
