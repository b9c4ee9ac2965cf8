"""The ops of a fused step in plain torch, on any device: the oracle of the Triton ops, and their
substitute where there is no GPU.

On the CPU in float32 they are made of the reference ops, and round where these round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import attention, reference
from octavo.kernels.cuda.ops import (
    Attend,
    AttentionLayer,
    ExpertLayer,
    LatentLayer,
    StepTensors,
)
from octavo.kernels.cuda.products import ACTIVATIONS, Multiply, PlainProducts
from octavo.kernels.experts import add_up, clamped_swiglu, route
from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.kernels.routing import CLAMPED_SWIGLU

_GATES = {**ACTIVATIONS, CLAMPED_SWIGLU: clamped_swiglu}


class PlainOps:
    """Implements :class:`octavo.kernels.cuda.ops.StepOps` and ``LatentOps`` in plain torch."""

    def __init__(self, multiply: Multiply = reference.linear) -> None:
        self.products, self._multiply = PlainProducts(multiply), multiply

    def reset(self) -> None:
        self.products.reset()

    def norm(self, x: Tensor, norm: RowNorm, out: Tensor, rows: Tensor | None = None) -> None:
        out.copy_(_normed(x if rows is None else x[rows], norm))

    def add_norm(
        self,
        x: Tensor,
        y: Tensor,
        y_norm: RowNorm | None,
        total: Tensor,
        norm: RowNorm,
        out: Tensor,
    ) -> None:
        total.copy_(x + (y if y_norm is None else _normed(y, y_norm)))
        out.copy_(_normed(total, norm))

    def activate(self, gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
        out.copy_(ACTIVATIONS[activation](gate.float(), up.float()))

    def layernorm(self, x: Tensor, norm: RowNorm, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(reference.layernorm(x, norm.weight, bias, norm.eps))

    def activate_alone(self, x: Tensor, activation: str, out: Tensor) -> None:
        name = "gelu" if activation == "gelu_erf" else activation
        out.copy_(reference.activate(x.float(), name))

    def sigmoid_mul(self, gate: Tensor, x: Tensor, out: Tensor) -> None:
        out.copy_(reference.sigmoid_mul(gate, x))

    def run_experts(
        self,
        x: Tensor,
        logits: Tensor,
        step: StepTensors,
        layer: ExpertLayer,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        ids, weights = route(logits, layer.routing, layer.correction)
        num_experts, rows = layer.routing.num_experts, x.float()
        gates_up, downs = (
            _by_expert(matrix.dense(torch.float32), bias, num_experts)
            for matrix, bias in (
                (layer.gate_up, layer.gate_up_bias),
                (layer.down, layer.down_bias),
            )
        )

        def run(index: int, taken: Tensor) -> Tensor:
            gate, up = self._multiply(taken, *gates_up[index]).chunk(2, dim=1)
            inner = _GATES[layer.activation](gate, up)
            # Between its two products, an expert rounds as the kernels do.
            return self._multiply(inner.to(x.dtype).float(), *downs[index])

        made = add_up(rows, ids, weights, run)
        out.copy_(made if residual is None else residual + made)

    def write_kv(
        self, qkv: Tensor, step: StepTensors, layer: AttentionLayer, q_out: Tensor
    ) -> None:
        (_, num_heads, head_dim), num_kv_heads = q_out.shape, layer.k_cache.num_heads
        norms, rope = layer.norms, layer.rope
        heads = qkv.unflatten(1, (-1, head_dim))
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = _normed(q, RowNorm(norms.q, norms.eps)), _normed(k, RowNorm(norms.k, norms.eps))
        if rope is not None:
            q, k = reference.rope(q, k, step.positions, rope.cos_sin, rope.interleaved)
        q_out.copy_(q)
        slots = step.slots[layer.group]
        is_written = slots >= 0
        reference.store_kv(
            *(k[is_written], v[is_written], layer.k_cache, layer.v_cache),
            slots[is_written].long(),
        )

    def attend_latents(
        self, q: Tensor, ckv: Tensor, step: StepTensors, layer: LatentLayer, out: Tensor
    ) -> None:
        slots, rope, caches = step.slots[layer.group], layer.rope, (layer.latents, layer.rope_keys)
        is_written = slots >= 0
        reference.store_latents(
            ckv[is_written],
            layer.norm,
            RopeArguments(step.positions[is_written], rope.cos_sin, rope.interleaved),
            *caches,
            slots[is_written].long(),
        )
        plan = _Plan(step).of_group(layer.group, layer.latents.parts[0].shape[1])
        if plan is None:
            out.zero_()
            return
        rotation = RopeArguments(step.positions, rope.cos_sin, rope.interleaved)
        kv_b = layer.kv_b.dense(q.dtype)
        out.copy_(reference.latent_attention(q, kv_b, rotation, *caches, plan, layer.scale))

    def plan_attention(self, step: StepTensors) -> Attend:
        plan = _Plan(step)
        return plan.attend

    def find_damage(self, x: Tensor, damaged: Tensor) -> None:
        # The sum of a row is finite if and only if all of it is, short of overflow in float32.
        damaged.copy_(~torch.isfinite(x.float().abs().sum(dim=-1)))

    def softcap(self, logits: Tensor, cap: float) -> None:
        logits.copy_(reference.softcap(logits, cap))


class _Plan:
    """Attention plans of the reference ops, one for each group, made for the first layer that needs
    it."""

    def __init__(self, step: StepTensors):
        self._tables = step.tables
        self._made: dict[
            tuple[int, int], attention.ReferenceAttentionPlan
        ] = {}  # by group and block size

    def attend(self, q: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        plan = self.of_group(layer.group, layer.k_cache.parts[0].shape[1])
        if plan is None:
            out.zero_()
            return
        scoring = layer.scoring
        options = scoring.scale, scoring.window, scoring.softcap, scoring.sinks
        out.copy_(reference.paged_attention(q, layer.k_cache, layer.v_cache, plan, *options))

    def of_group(self, group: int, block_size: int) -> attention.ReferenceAttentionPlan | None:
        """The plan of a group; None for a step of padding only, which plans do not support."""
        if not self._tables[group].seq_lens.any():
            return None
        if (group, block_size) not in self._made:
            tables = self._tables[group]
            self._made[group, block_size] = attention.plan_attention(
                tables.block_tables,
                tables.query_start,
                tables.seq_lens,
                int(tables.query_start.diff().max()),
                int(tables.seq_lens.max()),
                block_size,
            )
        return self._made[group, block_size]


def _by_expert(
    matrix: Tensor, bias: Tensor | None, num_experts: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Rows of a matrix, and of a bias, for each expert."""
    biases = [None] * num_experts if bias is None else bias.chunk(num_experts)
    return list(zip(matrix.chunk(num_experts), biases, strict=True))


def _normed(x: Tensor, norm: RowNorm) -> Tensor:
    return reference.rmsnorm(x, norm.weight, norm.eps)
