"""Memory of sequences beside the weights: KV of their tokens, and recurrent states.

MHA, GQA, MQA   2 Hkv d b of a token and layer; a device has ceil(Hkv / tp) heads, one at least (on
                CPUs those that its query heads read: 3 heads of 9 query heads are 2 and 2)
MLA             (kv_rank + rope_dim) b, on every device of a tensor-parallel group, or on one of
                them where each has requests of its own; index_dim b more where an indexer selects
                what is looked at
a window        no more than the last tokens of it, and those that a step adds
a recurrence    the same for any length, in 32-bit floats
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil

from octavo.cost.mixers import Indexer, LatentAttention, Mixer
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.precision import Precision
from octavo.cost.rank_model import AttentionOp
from octavo.cost.shares import WHOLE, Shares

_STATE_BYTES = 4  # of a number of a recurrent state


def attention_ops(
    layers: Iterable[LayerSpec],
    precision: Precision,
    shares: Shares = WHOLE,
    num_sharing: int = 1,
) -> tuple[AttentionOp, ...]:
    """The mixers of a stage's layers on one device; ``num_sharing``: as of ``AttentionOp``."""
    counts = Counter(mixer for layer in layers for mixer in layer.mixers)
    return tuple(
        _attention_op(mixer, count, precision, shares, num_sharing)
        for mixer, count in counts.items()
    )


def kv_bytes_per_token(spec: ModelSpec, precision: Precision, shares: Shares = WHOLE) -> float:
    """KV bytes of one token in all layers whose windows it lies in, on the device that has most."""
    ops = attention_ops(spec.layers, precision, shares)
    return sum(op.count * op.kv_bytes_per_token for op in ops)


def sequence_bytes(
    attention: Iterable[AttentionOp],
    length: int,
    *,
    block_size: int = 1,
    step_tokens: int = 1,
    keeps_windows_only: bool = True,
) -> float:
    """Bytes of a sequence of ``length`` tokens in these layers, its states included.

    Args:
        block_size: tokens are kept in blocks of so many.
        step_tokens: that a step may add to it, and a window has to hold beside those it sees.
        keeps_windows_only: what no window sees any more is forgotten.
    """
    total = 0.0
    for op in attention:
        kept = length
        if op.window is not None and keeps_windows_only:
            kept = min(length, op.window - 1 + step_tokens)
        tokens = ceil(kept / block_size) * block_size
        total += op.count * (tokens * op.kv_bytes_per_token + op.state_bytes)
    return total


def _attention_op(
    mixer: Mixer, count: int, precision: Precision, shares: Shares, num_sharing: int
) -> AttentionOp:
    prefill, decode = mixer.flops_per_score(shares)
    return AttentionOp(
        name=_name(mixer),
        count=count,
        flops_per_score=prefill,
        kv_bytes_per_token=precision.kv.token_bytes(*mixer.kv_vectors(shares)),
        decode_flops_per_score=None if decode == prefill else decode,
        window=mixer.window,
        selected=mixer.selected if isinstance(mixer, LatentAttention) else None,
        state_bytes=mixer.state_values(shares) * _STATE_BYTES,
        num_sharing=num_sharing,
    )


def _name(mixer: Mixer) -> str:
    if isinstance(mixer, LatentAttention):
        return "attention.latent"
    if isinstance(mixer, Indexer):
        return "attention.index"
    if mixer.state_values(WHOLE):
        return "attention.state"
    return "attention" if mixer.window is None else "attention.window"
