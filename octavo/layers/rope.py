"""Rotary position embeddings: angles, and tables of their cosines and sines.

Scalings, by the names of ``rope_parameters.rope_type`` in Hugging Face configs:

- ``linear``    all frequencies divided by ``factor`` (position interpolation)
- ``dynamic``   as trained up to ``original_max_position``; a position p beyond takes the NTK-aware
  base for a sequence of p + 1 tokens, which is what decoding token by token gives elsewhere
- ``yarn``      low frequencies divided by ``factor``, high ones kept, a linear ramp between the
  dimensions that turn ``beta_slow`` and ``beta_fast`` times in the trained length (Peng et al.
  2023, arXiv 2309.00071)
- ``longrope``  each frequency has its own divisor (Ding et al. 2024, arXiv 2402.13753), the long
  list if more positions are served than were trained (``--max-model-len`` says so), else the short
  one: KV is kept, so the list cannot change in the middle of a sequence
- ``llama3``    wavelengths above L / low_freq_factor divided by ``factor``, those below
  L / high_freq_factor kept, a smooth mix between, L being the trained length
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import numpy as np

from octavo.layers.context import ForwardContext
from octavo.layers.module import Module
from octavo.layers.parameter import Parameter
from octavo.layers.rope_config import RopeConfig

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
        self._table = np.empty((0, config.rotary_dim), dtype=np.float32)

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
        known = len(self._table)
        if known < num_positions:
            needed = max(num_positions, known + known // _GROWTH_SHARE)
            size = -(-needed // _GROWTH) * _GROWTH
            self._table = np.concatenate([self._table, self._cos_sin(np.arange(known, size))])
        return self._table

    def _cos_sin(self, positions: np.ndarray) -> np.ndarray:
        # Angles are float32 throughout, as these models were trained: more exact ones would
        # differ. Cosines and sines go through float64, so that they are equal on any processor.
        frequencies = inverse_frequencies(self._with_factors(), positions)
        if self.freq_factors is not None:
            frequencies = frequencies / self.freq_factors.value
        angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        return table * np.float32(self.config.attention_factor)

    def _with_factors(self) -> RopeConfig:
        """The config, with longrope's divisors where the checkpoint has them as tensors."""
        if self.short_factors is None or self.long_factors is None:
            return self.config
        short, long = (tuple(p.value.tolist()) for p in (self.short_factors, self.long_factors))
        return replace(self.config, short_factor=short, long_factor=long)


def inverse_frequencies(config: RopeConfig, positions: np.ndarray) -> np.ndarray:
    """Angle per position, float32 [rotary_dim / 2], or [P, rotary_dim / 2] if it depends on the
    position."""
    match config.scaling:
        case "default":
            return _unscaled(config)
        case "linear":
            return _unscaled(config) / np.float32(config.factor)
        case "dynamic":
            return _dynamic(config, positions)
        case "yarn":
            return _yarn(config)
        case "longrope":
            return _longrope(config)
        case "llama3":
            return _llama3(config)
    raise AssertionError(f"unknown rope scaling {config.scaling!r}")


def _exponents(config: RopeConfig) -> np.ndarray:
    return np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)


def _unscaled(config: RopeConfig) -> np.ndarray:
    return np.float32(1) / np.float32(config.theta) ** _exponents(config)


def _dynamic(config: RopeConfig, positions: np.ndarray) -> np.ndarray:
    length = np.maximum(positions + 1, config.original_max_position).astype(np.float64)
    stretch = config.factor * length / config.original_max_position - (config.factor - 1)
    base = config.theta * stretch ** (config.rotary_dim / (config.rotary_dim - 2))
    return np.float32(1) / base.astype(np.float32)[:, None] ** _exponents(config)


def _yarn(config: RopeConfig) -> np.ndarray:
    def dimension(turns: float) -> float:
        """The (fractional) dimension that rotates this many times over the trained length."""
        wavelength = config.original_max_position / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    places = np.arange(config.rotary_dim // 2, dtype=np.float32)
    ramp = ((places - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    kept = _unscaled(config)
    return kept / np.float32(config.factor) * ramp + kept * (1 - ramp)


def _longrope(config: RopeConfig) -> np.ndarray:
    is_long = config.max_position > config.original_max_position
    factors = np.array(config.long_factor if is_long else config.short_factor, dtype=np.float32)
    return np.float32(1) / (factors * np.float32(config.theta) ** _exponents(config))


def _llama3(config: RopeConfig) -> np.ndarray:
    kept = _unscaled(config)
    divided = kept / np.float32(config.factor)
    # Number of rotations in the trained length.
    turns = np.float32(config.original_max_position) * kept / np.float32(2 * math.pi)
    low, high = np.float32(config.low_freq_factor), np.float32(config.high_freq_factor)
    smooth = (turns - low) / (high - low)
    mixed = (1 - smooth) * divided + smooth * kept
    return np.where(turns < low, divided, np.where(turns > high, kept, mixed))
