"""Rotary position embeddings: angles, and tables of their cosines and sines.

Scalings, by the names of ``rope_parameters.rope_type`` in Hugging Face configs:

- ``linear``    all frequencies divided by ``factor`` (position interpolation)
- ``dynamic``   as trained up to ``original_max_position``; a position p beyond takes the NTK-aware
  base for a sequence of p + 1 tokens, which is what decoding token by token gives elsewhere
- ``yarn``      low frequencies divided by ``factor``, high ones kept, a linear ramp between the
  dimensions that turn ``beta_slow`` and ``beta_fast`` times in the trained length (Peng et al.
  2023, arXiv 2309.00071)
- ``longrope``  each frequency has its own divisor (Ding et al. 2024, arXiv 2402.13753), the long
  list if more positions are served than were trained, else the short one: KV is kept, so the list
  cannot change in the middle of a sequence
- ``llama3``    wavelengths above L / low_freq_factor divided by ``factor``, those below
  L / high_freq_factor kept, a smooth mix between, L being the trained length
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from octavo.layers.context import ForwardContext
from octavo.layers.parameter import Parameter
from octavo.layers.rope_config import RopeConfig

# Tables grow by whole pieces, so that decoding does not extend them at every step.
_GROWTH = 1024


class RotaryEmbedding(nn.Module):
    """Cosines and sines for all positions met so far: a long context costs nothing upfront."""

    def __init__(self, config: RopeConfig):
        super().__init__()
        self.config = config
        half = config.rotary_dim // 2
        self.freq_factors = Parameter(half, exact=True) if config.has_freq_factors else None
        self._table: Tensor | None = None

    def forward(self, ctx: ForwardContext) -> Tensor:
        """The table for a step, see :meth:`table`."""
        return ctx.rope_table(self.table, self.config.rotary_dim)

    def table(self, num_positions: int, device: torch.device) -> Tensor:
        """float32 [P, rotary_dim] for P >= ``num_positions``: cosines, then sines, of a position.

        A new tensor replaces the table when it grows; rows that it has keep their bits.
        """
        table = self._table
        if table is None or table.shape[0] < num_positions or table.device != device:
            size = -(-num_positions // _GROWTH) * _GROWTH
            table = self._table = self._cos_sin(torch.arange(size)).to(device)
        return table

    def _cos_sin(self, positions: Tensor) -> Tensor:
        # In float32 throughout, as these models were trained: more exact angles would be others.
        frequencies = inverse_frequencies(self.config, positions)
        if self.freq_factors is not None:
            frequencies = frequencies / self.freq_factors.tensor.cpu()
        angles = positions.float().unsqueeze(1) * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=1) * self.config.attention_factor


def inverse_frequencies(config: RopeConfig, positions: Tensor) -> Tensor:
    """Angle per position, float32 [rotary_dim / 2]; [P, rotary_dim / 2] where it depends on it."""
    match config.scaling:
        case "default":
            return _unscaled(config)
        case "linear":
            return _unscaled(config) / config.factor
        case "dynamic":
            return _dynamic(config, positions)
        case "yarn":
            return _yarn(config)
        case "longrope":
            return _longrope(config)
        case "llama3":
            return _llama3(config)
    raise AssertionError(f"unknown rope scaling {config.scaling!r}")


def _exponents(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim


def _unscaled(config: RopeConfig) -> Tensor:
    return 1.0 / config.theta ** _exponents(config)


def _dynamic(config: RopeConfig, positions: Tensor) -> Tensor:
    length = (positions + 1).clamp(min=config.original_max_position).double()
    stretch = config.factor * length / config.original_max_position - (config.factor - 1)
    base = config.theta * stretch ** (config.rotary_dim / (config.rotary_dim - 2))
    return 1.0 / base.float().unsqueeze(1) ** _exponents(config)


def _yarn(config: RopeConfig) -> Tensor:
    def dimension(turns: float) -> float:
        """The dimension (as a real number) that turns so many times in the trained length."""
        wavelength = config.original_max_position / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(config.rotary_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = _unscaled(config)
    return kept / config.factor * ramp + kept * (1 - ramp)


def _longrope(config: RopeConfig) -> Tensor:
    is_long = config.max_position > config.original_max_position
    factors = torch.tensor(config.long_factor if is_long else config.short_factor)
    return 1.0 / (factors * config.theta ** _exponents(config))


def _llama3(config: RopeConfig) -> Tensor:
    kept = _unscaled(config)
    divided = kept / config.factor
    turns = config.original_max_position * kept / (2 * math.pi)  # in the trained length
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = (turns - low) / (high - low)
    mixed = (1 - smooth) * divided + smooth * kept
    return torch.where(turns < low, divided, torch.where(turns > high, kept, mixed))
