"""The ops of recurrent layers in plain torch: the oracle of the native ones, and the fallback.

Tokens are processed one after the other, as the recurrences are defined. Chunked forms are faster
on a GPU, but their results depend on where a prompt is cut; these do not. Shapes: T tokens of a
step, each row a projection's output (``recurrence_specs.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.recurrence_specs import ConvSpec, DeltaSpec, GatedNormSpec, ScanSpec

# Added to the squared length of a key or query before its root.
_TINY = 1e-6


class SequenceStates(NamedTuple):
    """Rows ``begin`` to ``end`` of a step belong to a sequence, whose states are in these slots."""

    begin: int
    end: int
    source: int | None  # None for a new sequence
    target: int


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of a layer, float32 [slots, ...] for each of its arrays, and the sequences of a
    step."""

    memories: Sequence[Tensor]
    sequences: Sequence[SequenceStates]

    def begin(self, index: int, sequence: SequenceStates) -> Tensor:
        """A copy of one of the states that a sequence continues from; zeros for a new sequence."""
        memory = self.memories[index]
        if sequence.source is None:
            return torch.zeros_like(memory[0])
        return memory[sequence.source].clone()

    def end(self, index: int, sequence: SequenceStates, state: Tensor) -> None:
        self.memories[index][sequence.target] = state


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: LayerStates, spec: ConvSpec
) -> Tensor:
    """Convolve columns of x [T, W] with ``weight`` [C, 1, K]: [T, C]. Its state is the first
    memory."""
    size, wide = spec.channels, x[:, spec.first :].float()
    inputs = wide[:, :size]
    if spec.gated:
        inputs = inputs * wide[:, 2 * size : 3 * size]
    taps = weight.flatten(1).t()
    out = torch.empty_like(inputs)
    for sequence in states.sequences:
        known = torch.cat([states.begin(0, sequence), inputs[sequence.begin : sequence.end]])
        count = sequence.end - sequence.begin
        total = torch.zeros_like(out[:count]) if bias is None else bias.expand(count, -1)
        for tap, values in zip(taps, known.unfold(0, count, 1), strict=True):
            total = total + tap * values.t()
        out[sequence.begin : sequence.end] = total
        states.end(0, sequence, known[count:])
    out = wide[:, size : 2 * size] * out if spec.gated else out / (1 + torch.exp(-out))
    return out.to(x.dtype)


def selective_scan(
    x: Tensor,
    steps: Tensor,
    a_log: Tensor,
    skip: Tensor,
    step_bias: Tensor,
    states: LayerStates,
    spec: ScanSpec,
) -> Tensor:
    """Selective scan of x [T, heads * head_dim + 2 * groups * state_dim] with step sizes from
    columns of ``steps``: [T, heads * head_dim]. Its state is the second memory.

    For a head with the state S [state_dim, head_dim], which begins as zeros::

        step = softplus(its column * step_scale + step_bias), within limits
        S    = S * exp(-step * exp(a_log)) + B * (step * x)
        y    = C * S + skip * x
    """
    decay = -torch.exp(a_log)
    shared = (spec.groups, spec.state_dim)
    out = x.new_empty(x.shape[0], spec.width)
    for sequence in states.sequences:
        state = states.begin(1, sequence)
        for row in range(sequence.begin, sequence.end):
            values, b, c = x[row].float().split([spec.width, *2 * [shared[0] * shared[1]]])
            values = values.view(spec.heads, 1, spec.head_dim)
            b, c = (
                part.view(shared).repeat_interleave(spec.heads // spec.groups, 0).unsqueeze(2)
                for part in (b, c)
            )
            step = steps[row, spec.first : spec.first + spec.heads].float() * spec.step_scale
            step = _softplus(step + step_bias).clamp(spec.step_min, spec.step_max)
            kept = torch.exp(step * decay).view(-1, 1, 1)
            state = state * kept + b * (step.view(-1, 1, 1) * values)
            y = (state * c).sum(1) + skip.view(-1, 1) * values[:, 0]
            out[row] = y.flatten().to(x.dtype)
        states.end(1, sequence, state)
    return out


def delta_rule(
    x: Tensor,
    gates: Tensor,
    a_log: Tensor,
    step_bias: Tensor,
    states: LayerStates,
    spec: DeltaSpec,
) -> Tensor:
    """Gated delta rule on x [T, 2 * key_heads * key_dim + value_heads * value_dim] with ``gates``
    [T, 2 * value_heads]: [T, value_heads * value_dim]. Its state is the second memory.

    For a head with the state S [key_dim, value_dim], with q and k of length 1::

        S = S * exp(-exp(a_log) * softplus(decay + step_bias))
        S = S + k * sigmoid(write) * (v - k S)
        y = q S / sqrt(key_dim)
    """
    keys = (spec.key_heads, spec.key_dim)
    repeats = spec.value_heads // spec.key_heads
    decay = -torch.exp(a_log)
    out = x.new_empty(x.shape[0], spec.width)
    for sequence in states.sequences:
        state = states.begin(1, sequence)
        for row in range(sequence.begin, sequence.end):
            q, k, v = x[row].float().split([*2 * [keys[0] * keys[1]], spec.width])
            q, k = (
                _unit(part.view(keys)).repeat_interleave(repeats, 0).unsqueeze(2) for part in (q, k)
            )
            write, step = gates[row].float().chunk(2)
            kept = torch.exp(decay * _softplus(step + step_bias))
            state = state * kept.view(-1, 1, 1)
            error = v.view(spec.value_heads, -1) - (state * k).sum(1)
            written = error / (1 + torch.exp(-write)).unsqueeze(1)
            state = state + k * written.unsqueeze(1)
            y = (state * q).sum(1) * spec.key_dim**-0.5
            out[row] = y.flatten().to(x.dtype)
        states.end(1, sequence, state)
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, spec: GatedNormSpec) -> Tensor:
    """Norm and gate x [T, W]; ``weight`` is [W], or [group] for all groups, or None without a
    norm."""
    opened = gate[:, spec.first : spec.first + spec.width].float() * spec.gate_scale
    opened = opened / (1 + torch.exp(-opened))
    if weight is None:
        return (x.float() * opened).to(x.dtype)
    wide = x.float() * opened if spec.gate_first else x.float()
    groups = wide.view(-1, spec.width // spec.group, spec.group)
    scale = torch.rsqrt((groups * groups).mean(dim=-1, keepdim=True) + spec.eps)
    normed = (groups * scale * weight.view(-1, spec.group)).flatten(1)
    return (normed if spec.gate_first else normed * opened).to(x.dtype)


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _TINY)
