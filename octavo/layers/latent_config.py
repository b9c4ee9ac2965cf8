"""The sizes of latent attention; plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), sizes in values.

    Args:
        q_rank: of the vector that all queries of a token are made of; None: they are made at once.
        kv_rank: of the vector that keys and values are made of, which is all that is kept of a
            token, beside ``rope_dim`` values of a key that heads share, and that is rotated.
        nope_dim, rope_dim: of a query, and a key: not rotated, and rotated.
        value_dim: of a value.
        norm_eps: of the norms of both vectors.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Values of a head's query."""
        return self.nope_dim + self.rope_dim
