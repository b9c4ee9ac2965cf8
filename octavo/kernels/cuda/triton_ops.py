"""The ops of a fused step by Triton kernels, without allocation or synchronization."""

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
from octavo.kernels.cuda.attention_plan import AttentionLimits, Gpu, HeadShape
from octavo.kernels.cuda.expert_products import ExpertProducts, ExpertSizes
from octavo.kernels.cuda.gemm_dispatch import GemmConditions
from octavo.kernels.cuda.kv_codes import kind_of
from octavo.kernels.cuda.kv_write import write_kv
from octavo.kernels.cuda.latents import GpuLatents, LatentSizes
from octavo.kernels.cuda.norms import layernorm, rmsnorm
from octavo.kernels.cuda.ops import (
    Attend,
    AttentionLayer,
    ExpertLayer,
    LatentLayer,
    LayerStores,
    StepTensors,
)
from octavo.kernels.cuda.products import Products
from octavo.kernels.cuda.triton_products import TritonProducts, WeightUse
from octavo.kernels.cuda.weights import DeviceWeight
from octavo.kernels.fused_ops import FusedOp, WeightRef
from octavo.kernels.op_arguments import RowNorm
from octavo.kernels.sum_division import MatrixPart


class TritonOps:
    """Implements :class:`octavo.kernels.cuda.ops.StepOps` and ``LatentOps`` by Triton kernels.

    Args:
        products: of the model; owns the memory between the launches of a product.
        attention: of the model; owns the memory of sequences that several programs share.
        experts, latents: of the model, with the memory between their products.
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
        # A token that is no padding has a slot in every group.
        self._experts.run(x, logits, step.slots[0], layer, residual, out)

    def write_kv(
        self, qkv: Tensor, step: StepTensors, layer: AttentionLayer, q_out: Tensor
    ) -> None:
        write_kv(qkv, step.positions, step.slots[layer.group], layer, q_out)

    def plan_attention(self, step: StepTensors) -> Attend:
        # How launches are cut depends on shapes, which all groups share.
        plan, tables = self._attention.plan(step.num_seqs, step.max_query), step.tables

        def attend(q: Tensor, layer: AttentionLayer, out: Tensor) -> None:
            self._attention.attend(q, layer, tables[layer.group], out, plan)

        return attend

    def attend_latents(
        self, q: Tensor, ckv: Tensor, step: StepTensors, layer: LatentLayer, out: Tensor
    ) -> None:
        self._latents.attend(q, ckv, step, layer, self._attention, out)

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
    """Create the ops of a :class:`FusedProgram`, which has the same arguments, with all their
    memory.

    Args:
        attention: limits of steps in which sequences have few tokens.
        is_invariant: a token's results have the same bits whatever other tokens there are.
        activations: as in ``GemmConditions``.

    Raises:
        ConfigError: the kernels cannot read a KV cache like this one.
    """
    uses = _uses(ops, weight_of, max_tokens, max_rows, is_invariant)
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
    is_invariant: bool,
) -> Iterator[WeightUse]:
    for op in ops:
        if isinstance(op, fused_ops.FusedLinear):
            matrices, gated = [segment.weight for segment in op.segments], op.activation is not None
            most = max_tokens
        elif isinstance(op, fused_ops.FusedHead):
            matrices, gated, most = [op.weight], False, max_rows
        else:
            continue
        whole = sum(_whole(matrix).shape[0] for matrix in matrices) if is_invariant else None
        yield WeightUse(weight_of(matrices), most, gated, whole)


def _whole(matrix: WeightRef) -> WeightRef:
    """The matrix that a reference is to some rows of."""
    return matrix.of if isinstance(matrix, MatrixPart) else matrix


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
    """Head shapes of all layers; ConfigError if no kernel reads the format of their keys and
    values."""
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
