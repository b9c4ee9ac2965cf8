"""Sizes of multi-head latent attention; plain values, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in values.

    Args:
        q_rank: of the latent vector of queries; None where queries have a single projection.
        kv_rank: of the latent vector of keys and values, which is cached for each token together
            with a rotated key of ``rope_dim`` values that all heads share.
        nope_dim, rope_dim: of the parts of a query and a key without and with rotation.
        value_dim: of a value.
        norm_eps: epsilon of the norms of both latent vectors.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Size of a head's query."""
        return self.nope_dim + self.rope_dim
