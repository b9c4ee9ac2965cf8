"""Ops that the fused program of a GPU calls, and the tensors of a step that they take.

A :class:`StepOps` computes on tensors that exist already: it allocates nothing, never synchronizes,
and launches kernels that depend on shapes alone, so that a step can be captured in a CUDA graph.
``triton_ops.py`` implements it by Triton kernels, ``plain_ops.py`` in plain torch, which is slow,
runs anywhere and need not keep these promises.

Steps are padded to the captured shapes, and padding is harmless: slot -1 is not written, a sequence
of length 0 reads nothing, and the results of padding rows are never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from octavo.kernels.cuda.attention_plan import Scoring, StepTables
from octavo.kernels.cuda.products import Products
from octavo.kernels.cuda.weights import DeviceWeight
from octavo.kernels.kv_stores import KVStore
from octavo.kernels.op_arguments import RowNorm
from octavo.kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step of T tokens and S sequences, padding included.

    Layers of a group share slots and block tables.
    """

    token_ids: Tensor  # int32 [T], each in the vocabulary
    positions: Tensor  # int32 [T]
    slots: Sequence[Tensor]  # of each group, int32 [T]; in -1 nothing is written
    tables: Sequence[StepTables]  # of each group
    max_query: int  # the most tokens that a sequence may have, 1 in pure decode

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.tables[0].seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of query heads and of key heads: weights [D]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding, as :func:`octavo.kernels.reference.rope` takes it."""

    cos_sin: Tensor  # float32 [P, rotary]
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The KV cache and the constants of an attention layer.

    Args:
        norms, rope: of queries and keys before they are cached or compared; None for neither.
        group: whose slots and block tables the layer uses.
    """

    k_cache: KVStore
    v_cache: KVStore
    scoring: Scoring
    norms: HeadNorms | None = None
    rope: Rope | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """The caches and the constants of a layer of latent attention, as the reference ops take them.

    Args:
        latents, rope_keys: caches of the latent vectors, and of the rotated keys beside them.
        group: whose slots and block tables the layer uses.
    """

    kv_b: DeviceWeight
    norm: RowNorm
    rope: Rope
    scale: float
    latents: KVStore
    rope_keys: KVStore
    group: int = 0


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The E experts of a layer: matrices and biases are stacked. ``activation`` as in a fused
    op."""

    gate_up: DeviceWeight  # [E 2 F, K], for each expert the gate before the up
    down: DeviceWeight  # [E K, F]
    routing: Routing
    activation: str
    gate_up_bias: Tensor | None = None  # [E 2 F]
    down_bias: Tensor | None = None  # [E K]
    correction: Tensor | None = None  # float32 [E]


class LayerStores(Protocol):
    """The KV cache of a model."""

    def layer(self, index: int) -> tuple[KVStore, KVStore]:
        """Keys and values of a layer, always in the same memory."""
        ...

    def group_of(self, index: int) -> int:
        """Group of a layer, whose block tables it uses."""
        ...


class Attend(Protocol):
    """Attention of one step, planned; each layer calls it."""

    def __call__(self, q: Tensor, layer: AttentionLayer, out: Tensor) -> None:
        """Attention of q [T, H, D], as ``write_kv`` left it, over a layer's caches, to out
        [T, H, D]."""
        ...


class StepOps(Protocol):
    """Ops of a fused step. Results are rounded to the type of their tensor, and sums are in
    float32.

    Tensors [T, K] may be columns of wider ones; the last dimension is contiguous.
    """

    @property
    def products(self) -> Products:
        """Products with weights, and lookups of their rows."""
        ...

    def norm(self, x: Tensor, norm: RowNorm, out: Tensor, rows: Tensor | None = None) -> None:
        """Compute out [R, K], the rmsnorm of x [T, K], or of its ``rows`` (int32 [R])."""
        ...

    def add_norm(
        self,
        x: Tensor,
        y: Tensor,
        y_norm: RowNorm | None,
        total: Tensor,
        norm: RowNorm,
        out: Tensor,
    ) -> None:
        """Compute total = x + y, with y normed first if it has a norm, and out = norm(total), all
        [T, K]."""
        ...

    def activate(self, gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
        """Compute out = activation(gate) * up, [T, F]; "silu", "gelu_tanh" or "gelu_erf"."""
        ...

    def layernorm(self, x: Tensor, norm: RowNorm, bias: Tensor | None, out: Tensor) -> None:
        """Compute out [T, K], the layernorm of x [T, K]."""
        ...

    def activate_alone(self, x: Tensor, activation: str, out: Tensor) -> None:
        """Compute out [T, F] = activation(x), with an activation of ``activate``, or "relu"."""
        ...

    def sigmoid_mul(self, gate: Tensor, x: Tensor, out: Tensor) -> None:
        """Compute out [T, F] = sigmoid(gate) * x, with gates [T, F] or [T, 1]."""
        ...

    def run_experts(
        self,
        x: Tensor,
        logits: Tensor,
        step: StepTensors,
        layer: ExpertLayer,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """Compute out [T, K], the weighted outputs of the experts that ``logits`` (float32 [T, E])
        choose for x [T, K], plus the residual [T, K], which may share memory with ``out``. Padding
        rows need not be computed."""
        ...

    def write_kv(
        self, qkv: Tensor, step: StepTensors, layer: AttentionLayer, q_out: Tensor
    ) -> None:
        """Norm and rotate the query and key heads of qkv [T, (H + 2 Hk) D]; write keys and values
        to the step's slots of a layer, and queries to q_out [T, H, D] for ``Attend``."""
        ...

    def plan_attention(self, step: StepTensors) -> Attend:
        """Plan the attention of a step, for all of its layers."""
        ...

    def find_damage(self, x: Tensor, damaged: Tensor) -> None:
        """Set damaged (int32 [T]) to 1 where a row of x [T, K] has a NaN or an infinity, else to
        0."""
        ...

    def reset(self) -> None:
        """Reset the counters of launches, after a step of which some launches may be missing: the
        next step would take a half-counted sum too early."""
        ...

    def softcap(self, logits: Tensor, cap: float) -> None:
        """Compute cap * tanh(logits / cap), in place of float32 logits [R, V]."""
        ...


@runtime_checkable
class LatentOps(Protocol):
    """Additional ops for models with latent attention."""

    def attend_latents(
        self, q: Tensor, ckv: Tensor, step: StepTensors, layer: LatentLayer, out: Tensor
    ) -> None:
        """Write the rows of ckv [T, C + R], normed and rotated, to the step's slots of a layer, and
        the attention of q [T, H, P + R] over all cached rows to out [T, H, V]."""
        ...
