"""Configuration of rotary position embeddings; plain values, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Scaling = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embeddings of one kind of layer.

    ``rotary_dim`` values of a head are rotated in pairs: (i, rotary_dim / 2 + i), or (2 i, 2 i + 1)
    if ``interleaved``. Angle i of position p is p * theta^(-2 i / rotary_dim), changed by
    ``scaling``; :mod:`octavo.layers.rope` explains the other fields.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: Scaling = "default"
    factor: float = 1.0
    original_max_position: int = 0  # positions in training, before the context was extended
    max_position: int = 0  # positions that are served
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    has_freq_factors: bool = False  # the checkpoint has divisors as tensors, one per angle

    def unscaled(self) -> RopeConfig:
        """The same config without scaling, for the same number of positions."""
        return RopeConfig(
            theta=self.theta,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            original_max_position=self.max_position,
            max_position=self.max_position,
        )
