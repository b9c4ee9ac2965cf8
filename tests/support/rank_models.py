"""Ranks of well-known models, by hand: sizes from their configs, and the usual cuts."""

from __future__ import annotations

from octavo.cost.parallel import Parallel
from octavo.cost.rank_model import Arithmetic, AttentionOp, Experts, MatrixOp, RankModel


def dense(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    *,
    head_dim: int = 128,
    gated: bool = True,
    bytes_per_param: float = 2.0,
    arithmetic: Arithmetic = "fp16",
    parallel: Parallel | None = None,
    **more: object,
) -> RankModel:
    """A rank of a decoder whose matrices are all of one type."""
    parallel = parallel or Parallel()
    tp, count = parallel.tp, -(-layers // parallel.pp)

    def matrix(name: str, inputs: int, outputs: int, count: int = count, **more) -> MatrixOp:
        params = inputs * outputs
        size = params * bytes_per_param
        return MatrixOp(name, count, inputs, outputs, params, size, arithmetic, **more)

    queries, keys = heads * head_dim // tp, kv_heads * head_dim // tp
    return RankModel(
        (
            matrix("attention.qkv", hidden, queries + 2 * keys),
            matrix("attention.output", queries, hidden),
            matrix("mlp.up", hidden, (2 if gated else 1) * inner // tp),
            matrix("mlp.down", inner // tp, hidden),
            matrix("head", hidden, vocab // tp, 1, sampled_only=True),
        ),
        (AttentionOp("attention", count, 4.0 * queries, 2 * keys * 2.0),),
        hidden,
        vocab,
        count,
        parallel=parallel,
        **more,
    )


def llama_8b(**more) -> RankModel:
    return dense(4096, 14336, 32, 32, 8, 128256, **more)


def llama2_7b(**more) -> RankModel:
    return dense(4096, 11008, 32, 32, 32, 32000, **more)


def llama2_70b(**more) -> RankModel:
    return dense(8192, 28672, 80, 64, 8, 32000, **more)


def llama3_70b(**more) -> RankModel:
    return dense(8192, 28672, 80, 64, 8, 128256, **more)


def opt_13b(**more) -> RankModel:
    return dense(5120, 20480, 40, 40, 40, 50272, gated=False, **more)


def mixture(parallel: Parallel) -> RankModel:
    """48 layers of 128 experts of which a token uses 8, as Qwen3-30B-A3B has them."""
    hidden, inner, layers = 2048, 768, 48
    on_rank, cut = (128 // parallel.ep, 1) if parallel.ep > 1 else (128, parallel.tp)
    experts = Experts(128, 8, on_rank)

    def matrix(name: str, inputs: int, outputs: int) -> MatrixOp:
        params = on_rank * inputs * outputs
        return MatrixOp(name, layers, inputs, outputs, params, 2.0 * params, experts=experts)

    attention = hidden * (4096 + 2 * 512) // parallel.tp
    return RankModel(
        (
            MatrixOp("attention", layers, hidden, 5120 // parallel.tp, attention, 2.0 * attention),
            matrix("experts.gate_up", hidden, 2 * inner // cut),
            matrix("experts.down", inner // cut, hidden),
        ),
        (AttentionOp("attention", layers, 4.0 * 4096 / parallel.tp, 2048.0 / parallel.tp),),
        hidden,
        151_936,
        layers,
        num_moe_layers=layers,
        parallel=parallel,
    )
