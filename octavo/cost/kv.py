"""What sequences take beside the weights: keys and values of their tokens, and states.

MHA, GQA, MQA   2 Hkv d b of a token and layer; a device has ceil(Hkv / tp) heads, one at least
MLA             (kv_rank + rope_dim) b, on every device of a tensor-parallel group
a window        no more than the last tokens of it, and those that a step adds
a recurrence    the same for any length, in 32-bit floats
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from octavo.cost.mixers import Mixer
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.precision import Precision

_STATE_BYTES = 4  # of a number of a recurrent state


def kv_bytes_per_token(
    spec: ModelSpec,
    precision: Precision,
    tp: int = 1,
    layers: Sequence[LayerSpec] | None = None,
) -> float:
    """Of one token in all layers whose windows it lies in, on one device.

    ``layers``: those of a pipeline's stage, where it is one.
    """
    return sum(mixer_kv_bytes(mixer, precision, tp) for mixer in _mixers(spec, layers))


def kv_bytes_per_sequence(
    spec: ModelSpec,
    precision: Precision,
    length: int,
    *,
    tp: int = 1,
    layers: Sequence[LayerSpec] | None = None,
    block_size: int = 1,
    extra_in_window: int = 0,
) -> float:
    """Of a sequence of ``length`` tokens on one device, its state included.

    Args:
        block_size: tokens are kept in blocks of so many.
        extra_in_window: tokens beyond its window that a layer keeps: those of a step.
    """
    total = 0.0
    for mixer in _mixers(spec, layers):
        kept = length
        if mixer.window is not None:
            kept = min(length, mixer.window - 1 + max(1, extra_in_window))
        blocks = ceil(kept / block_size)
        total += blocks * block_size * mixer_kv_bytes(mixer, precision, tp)
    return total + state_bytes(spec, tp, layers)


def state_bytes(spec: ModelSpec, tp: int = 1, layers: Sequence[LayerSpec] | None = None) -> int:
    """Of a sequence's recurrent states on one device, whatever its length."""
    return sum(mixer_state_bytes(mixer, tp) for mixer in _mixers(spec, layers))


def mixer_kv_bytes(mixer: Mixer, precision: Precision, tp: int) -> float:
    """Of one token in one layer."""
    return precision.kv.token_bytes(*mixer.kv_vectors(tp))


def mixer_state_bytes(mixer: Mixer, tp: int) -> int:
    """Of one sequence in one layer."""
    return mixer.state_values(tp) * _STATE_BYTES


def _mixers(spec: ModelSpec, layers: Sequence[LayerSpec] | None) -> Iterator[Mixer]:
    for layer in spec.layers if layers is None else layers:
        yield from layer.mixers
