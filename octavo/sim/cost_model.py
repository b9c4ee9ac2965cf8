"""The time of a step from the bytes it has to move and the operations it has to do.

A roofline (Williams et al., CACM 2009) for each of two parts, matrix products and attention: a
part takes the longer of its memory time and its compute time, and the parts follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.batch import Batch
from octavo.sim.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What the time of a step depends on, of a decoder-only transformer.

    Args:
        linear_params: weights of all matrix products but the embedding and the output head.
        head_params: weights of the output head, vocabulary x hidden.
        weight_bytes: of what a step reads of them; quantization shows here.
        kv_bytes_per_token: keys and values of all layers.
        attention_width: layers x query heads x head dimension.
    """

    linear_params: int
    head_params: int
    weight_bytes: float
    kv_bytes_per_token: float
    attention_width: int


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Seconds of a batch; pass it to `octavo.executor.simulated.SimulatedExecutor`."""

    model: ModelCost
    hardware: HardwareSpec

    def __call__(self, batch: Batch) -> float:
        num_tokens = num_sampled = keys_read = scores = 0
        for item in batch.items:
            num_tokens += item.num_tokens
            num_sampled += item.samples
            keys_read += item.start + item.num_tokens
            # Causal: the i-th new token sees all before the chunk and i + 1 of the chunk.
            scores += item.num_tokens * item.start + item.num_tokens * (item.num_tokens + 1) // 2
        model, hardware = self.model, self.hardware
        linear_flops = 2.0 * (model.linear_params * num_tokens + model.head_params * num_sampled)
        linear = max(model.weight_bytes / hardware.memory_bandwidth, linear_flops / hardware.flops)
        attention = max(
            (keys_read + num_tokens) * model.kv_bytes_per_token / hardware.memory_bandwidth,
            4.0 * model.attention_width * scores / hardware.flops,
        )
        return linear + attention + hardware.step_overhead
