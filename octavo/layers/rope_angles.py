"""The angles of rotary position embeddings.

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

import numpy as np

from octavo.layers.rope_config import RopeConfig


def cos_sin(
    config: RopeConfig, positions: np.ndarray, freq_factors: np.ndarray | None = None
) -> np.ndarray:
    """Cosines, then sines, of positions: float32 [P, rotary_dim].

    ``freq_factors`` [rotary_dim / 2] are divisors of the frequencies that a checkpoint has beside
    its config.
    """
    # Angles in float32 throughout, as these models were trained: more exact ones would be others.
    # Their functions by way of float64, so that they are the same on any processor.
    frequencies = inverse_frequencies(config, positions)
    if freq_factors is not None:
        frequencies = frequencies / freq_factors
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return table * np.float32(config.attention_factor)


def inverse_frequencies(config: RopeConfig, positions: np.ndarray) -> np.ndarray:
    """Angle per position, float32 [rotary_dim / 2]; [P, rotary_dim / 2] where it depends on it."""
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
        """The dimension (as a real number) that turns so many times in the trained length."""
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
    # In the trained length.
    turns = np.float32(config.original_max_position) * kept / np.float32(2 * math.pi)
    low, high = np.float32(config.low_freq_factor), np.float32(config.high_freq_factor)
    smooth = (turns - low) / (high - low)
    mixed = (1 - smooth) * divided + smooth * kept
    return np.where(turns < low, divided, np.where(turns > high, kept, mixed))
