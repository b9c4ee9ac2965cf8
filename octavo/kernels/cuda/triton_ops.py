"""The ops of a fused step by Triton's kernels: nothing is allocated, nothing is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from octavo.kernels import fused_ops
from octavo.kernels.cuda import rows as row_kernels
from octavo.kernels.cuda.activations import (
    activation_alone,
    activation_mul_apart,
    sigmoid_mul,
)
from octavo.kernels.cuda.attention import GpuAttention
from octavo.kernels.cuda.attention_plan import AttentionLimits, Gpu, HeadShape, Scoring
from octavo.kernels.cuda.expert_products import ExpertProducts, ExpertSizes
from octavo.kernels.cuda.gemm_dispatch import GemmConditions
from octavo.kernels.cuda.kv_codes import kind_of
from octavo.kernels.cuda.kv_write import write_kv
from octavo.kernels.cuda.latents import GpuLatents, LatentSizes
from octavo.kernels.cuda.norms import layernorm, rmsnorm
from octavo.kernels.cuda.ops import (
    Attend,
    ExpertLayer,
    HeadNorms,
    LatentLayer,
    LayerStores,
    Rope,
    StepTensors,
)
from octavo.kernels.cuda.products import Products
from octavo.kernels.cuda.triton_products import TritonProducts, WeightUse
from octavo.kernels.cuda.weights import DeviceWeight
from octavo.kernels.fused_ops import FusedOp, WeightRef
from octavo.kernels.kv_stores import KVStore
from octavo.kernels.op_arguments import RowNorm


class TritonOps:
    """See :class:`octavo.kernels.cuda.ops.StepOps`, and ``LatentOps``.

    Args:
        products: who multiplies; has memory for what a product leaves between its launches.
        attention: that of the model; has memory for sequences that several programs share.
        experts, latents: those of the model, with memory for what lies between their products.
    """

    def __init__(
        self,
        products: Products,
        attention: GpuAttention,
        experts: ExpertProducts,
        latents: GpuLatents,
    ):
        self.products = products
        self._attention, self._experts, self._latents = attention, experts, latents

    def norm(self, x: Tensor, norm: RowNorm, out: Tensor, rows: Tensor | None = None) -> None:
        rmsnorm(x, norm, out, rows=rows)

    def add_norm(
        self,
        x: Tensor,
        y: Tensor,
        y_norm: RowNorm | None,
        total: Tensor,
        norm: RowNorm,
        out: Tensor,
    ) -> None:
        rmsnorm(y, norm, out, residual=x, total=total, norm_before_add=y_norm)

    def activate(self, gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
        activation_mul_apart(gate, up, out, activation)

    def layernorm(self, x: Tensor, norm: RowNorm, bias: Tensor | None, out: Tensor) -> None:
        layernorm(x, norm, bias, out)

    def activate_alone(self, x: Tensor, activation: str, out: Tensor) -> None:
        activation_alone(x, out, activation)

    def sigmoid_mul(self, gate: Tensor, x: Tensor, out: Tensor) -> None:
        sigmoid_mul(gate, x, out)

    def run_experts(
        self,
        x: Tensor,
        logits: Tensor,
        step: StepTensors,
        layer: ExpertLayer,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        # A token that is there is written in each of its groups.
        self._experts.run(x, logits, step.slots[0], layer, residual, out)

    def write_kv(
        self,
        qkv: Tensor,
        step: StepTensors,
        group: int,
        k_cache: KVStore,
        v_cache: KVStore,
        q_out: Tensor,
        norms: HeadNorms | None,
        rope: Rope | None,
    ) -> None:
        write_kv(qkv, step.positions, step.slots[group], k_cache, v_cache, q_out, norms, rope)

    def plan_attention(self, step: StepTensors) -> Attend:
        # How launches are cut depends on shapes, which are those of all groups.
        plan, tables = self._attention.plan(step.num_seqs, step.max_query), step.tables

        def attend(
            q: Tensor,
            group: int,
            k_cache: KVStore,
            v_cache: KVStore,
            scoring: Scoring,
            out: Tensor,
        ) -> None:
            self._attention.attend(q, k_cache, v_cache, tables[group], scoring, out, plan)

        return attend

    def attend_latents(
        self,
        q: Tensor,
        ckv: Tensor,
        step: StepTensors,
        group: int,
        latents: KVStore,
        rotated: KVStore,
        layer: LatentLayer,
        out: Tensor,
    ) -> None:
        self._latents.attend(
            q,
            ckv,
            step.positions,
            step.slots[group],
            step.tables[group],
            (latents, rotated),
            layer,
            self._attention,
            self._attention.plan(step.num_seqs, step.max_query),
            out,
        )

    def find_damage(self, x: Tensor, damaged: Tensor) -> None:
        row_kernels.find_damage(x, damaged)

    def reset(self) -> None:
        self.products.reset()
        self._attention.reset()

    def softcap(self, logits: Tensor, cap: float) -> None:
        row_kernels.softcap(logits, cap)


def create_triton_ops(
    ops: Sequence[FusedOp],
    weight_of: Callable[[Sequence[WeightRef]], DeviceWeight],
    kv_cache: LayerStores,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    max_rows: int,
    attention: AttentionLimits,
    gpu: Gpu,
    is_invariant: bool = False,
    activations: str = "auto",
) -> TritonOps:
    """The ops of a :class:`FusedProgram`, whose arguments these are, with all the memory they need.

    ConfigError if they do not read a KV cache like this one.

    Args:
        attention: of steps in which sequences have few tokens.
        is_invariant: what a token becomes has the same bits whatever other tokens there are.
        activations: as in ``GemmConditions``.
    """
    uses = _uses(ops, weight_of, max_tokens, max_rows)
    conditions = GemmConditions(gpu, dtype, is_invariant, activations)
    products = TritonProducts(uses, conditions, device)
    kinds = _head_shapes(ops, kv_cache, dtype)
    experts = ExpertProducts(_expert_sizes(ops), max_tokens, dtype, device, is_invariant)
    gpu_attention = GpuAttention(kinds, attention, gpu, device, is_invariant)
    latents = GpuLatents(_latent_sizes(ops), max_tokens, dtype, device, is_invariant)
    return TritonOps(products, gpu_attention, experts, latents)


def _uses(
    ops: Sequence[FusedOp],
    weight_of: Callable[[Sequence[WeightRef]], DeviceWeight],
    max_tokens: int,
    max_rows: int,
) -> Iterator[WeightUse]:
    for op in ops:
        if isinstance(op, fused_ops.FusedLinear):
            weight = weight_of([segment.weight for segment in op.segments])
            yield WeightUse(weight, max_tokens, gated=op.activation is not None)
        elif isinstance(op, fused_ops.FusedHead):
            yield WeightUse(weight_of([op.weight]), max_rows)


def _expert_sizes(ops: Sequence[FusedOp]) -> Iterator[ExpertSizes]:
    for op in ops:
        if isinstance(op, fused_ops.FusedExperts):
            inner, width = op.experts[0].gate.shape
            yield ExpertSizes(op.routing, inner, width)


def _latent_sizes(ops: Sequence[FusedOp]) -> Iterator[LatentSizes]:
    for op in ops:
        if isinstance(op, fused_ops.FusedLatentAttention):
            yield LatentSizes(op.q.shape[0], op.kv_b.shape[1], op.rope.rotary_dim)


def _head_shapes(
    ops: Sequence[FusedOp], kv_cache: LayerStores, dtype: torch.dtype
) -> set[HeadShape]:
    """Of all layers. ConfigError if no kernel reads what their keys and values are kept as."""
    shapes = set()
    for op in ops:
        if not isinstance(op, fused_ops.MIXERS):
            continue
        stores = kv_cache.layer(op.layer)
        for store in stores:
            kind_of(store)
        if isinstance(op, fused_ops.FusedAttention):
            shapes.add(HeadShape.of(torch.empty(0, *op.q.shape, dtype=dtype), *stores))
        else:
            heads = op.q.shape[0], op.kv_b.shape[1]
            shapes.add(HeadShape.of_latents(torch.empty(0, *heads, dtype=dtype), *stores))
    return shapes
