"""The seam from the other side: what an engine has loaded, or would load, as a `RankModel`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from octavo.cost.rank_model import Arithmetic, AttentionOp, Experts, MatrixOp, RankModel

if TYPE_CHECKING:
    from octavo.core.executor import WeightMatrix
    from octavo.models.config import KVSpec, ModelConfig


def live_rank_model(
    config: ModelConfig,
    matrices: Iterable[WeightMatrix],
    kv_bytes_per_token: float,
    num_ranks: int = 1,
) -> RankModel:
    """Make a ``RankModel`` of a model by its config, before it is loaded or as an engine has it.

    Activations do not count: they are small, and stay in caches.

    Args:
        matrices, kv_bytes_per_token: planned (`octavo.models.footprint`), or those of an engine's
            `Executor.probe()`, which has those of one rank.
        num_ranks: that share the attention, by heads or by layers.
    """
    layers = Counter(config.kv_layers)
    alike = Counter(
        (m.is_head, m.num_params, m.num_bytes, m.arithmetic, m.share or (1, 1)) for m in matrices
    )
    return RankModel(
        matrices=tuple(op for each in sorted(alike) for op in _matrix_ops(*each, alike[each])),
        attention=tuple(
            AttentionOp(
                _name(kept),
                count,
                flops_per_score=2.0
                * config.num_heads
                * _values_per_score(config, kept)
                / num_ranks,
                kv_bytes_per_token=kv_bytes_per_token / config.num_layers,
                window=kept.window,
            )
            for kept, count in layers.items()
        ),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        activation_bytes=0.0,
    )


def _name(kept: KVSpec) -> str:
    if kept.kind == "latent":
        return "attention.latent"
    return "attention" if kept.window is None else f"attention.{kept.window}"


def _values_per_score(config: ModelConfig, kept: KVSpec) -> int:
    """Products of a head for one query and one visible token: a key and a value; or a latent
    vector, with the rotated key for the score, and again as the value."""
    if kept.kind == "latent":
        return 2 * kept.key_dim + kept.value_dim
    return 2 * config.head_dim


def computed_in(arithmetic: str) -> Arithmetic:
    """The arithmetic of kernels, by the name of the peak that bounds it; 16 bits if they do not
    say."""
    if "int8" in arithmetic:  # with weights of fewer bits, too
        return "int8"
    if "float8" in arithmetic:
        return "fp8"
    return "fp32" if "float32" in arithmetic else "fp16"


def _matrix_ops(
    is_head: bool,
    num_params: int,
    num_bytes: int,
    arithmetic: str,
    share: tuple[int, int],
    count: int,
) -> Iterator[MatrixOp]:
    """Group matrices that are alike; a layer's experts are one group, as far as they are alike.
    Shapes are not part of it, and matter to activations only."""
    per_token, total = share
    layers, others = divmod(count, total)
    kind = "matrices" if total == 1 else "experts"
    for count, together in ((layers, total), (1, others)):
        if count and together:
            yield MatrixOp(
                name="head" if is_head else f"{kind} of {num_params:,}",
                count=count,
                inputs=0,
                outputs=0,
                num_params=num_params * together,
                num_bytes=num_bytes * together,
                arithmetic=computed_in(arithmetic),
                sampled_only=is_head,
                experts=None if total == 1 else Experts(total, per_token, on_rank=together),
            )
