"""What a fused step on a GPU takes, and the ops that its phases call.

A :class:`StepOps` computes on tensors that are there already: it allocates nothing, waits for
nothing, and launches what shapes alone decide, so that a step can be captured in a CUDA graph.
``triton_ops.py`` has that of the kernels, ``plain_ops.py`` its slow twin in plain torch, which runs
anywhere and need not keep these promises.

Steps are padded to the shapes that were captured, and padding is harmless: slot -1 is not written,
a sequence of length 0 reads nothing, and what rows of no sequence become is nobody's business.
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

    Groups are those of layers that share a block table: each has slots and tables of its own.
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
    """Of query and of key heads: weights [D]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """As :func:`octavo.kernels.reference.rope` takes it."""

    cos_sin: Tensor  # float32 [P, rotary]
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """What a layer of latent attention has of its own: as the reference ops take it."""

    kv_b: DeviceWeight
    norm: RowNorm
    rope: Rope
    scale: float


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of a layer, E of them: matrices have their rows one after the other, and so have
    biases. ``activation`` as in a phase."""

    gate_up: DeviceWeight  # [E 2 F, K], of each the gate before the up
    down: DeviceWeight  # [E K, F]
    routing: Routing
    activation: str
    gate_up_bias: Tensor | None = None  # [E 2 F]
    down_bias: Tensor | None = None  # [E K]
    correction: Tensor | None = None  # float32 [E]


class LayerStores(Protocol):
    """The KV cache."""

    def layer(self, index: int) -> tuple[KVStore, KVStore]:
        """Keys and values of a layer: the same memory at any time."""
        ...

    def group_of(self, index: int) -> int:
        """The group of a layer, by whose tables its blocks are found."""
        ...


class Attend(Protocol):
    """Attention of one step, planned: called by each of its layers."""

    def __call__(
        self,
        q: Tensor,
        group: int,
        k_cache: KVStore,
        v_cache: KVStore,
        scoring: Scoring,
        out: Tensor,
    ) -> None:
        """q [T, H, D], as ``write_kv`` has left it, over the caches of a layer of ``group``: to out
        [T, H, D]."""
        ...


class StepOps(Protocol):
    """Results are rounded to the type of the tensor that takes them, sums are in float32.

    Tensors [T, K] may be columns of wider ones; the last dimension is contiguous.
    """

    @property
    def products(self) -> Products:
        """Who multiplies with weights, and reads their rows."""
        ...

    def norm(self, x: Tensor, norm: RowNorm, out: Tensor, rows: Tensor | None = None) -> None:
        """out [R, K] = the rmsnorm of x [T, K]; of its ``rows`` (int32 [R]) if there are some."""
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
        """total = x + y, y being normed before if there is a norm for it, and out = norm(total);
        all of them [T, K]."""
        ...

    def activate(self, gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
        """out = activation(gate) * up, [T, F]; "silu", "gelu_tanh" or "gelu_erf"."""
        ...

    def layernorm(self, x: Tensor, norm: RowNorm, bias: Tensor | None, out: Tensor) -> None:
        """out [T, K] = the layernorm of x [T, K]."""
        ...

    def activate_alone(self, x: Tensor, activation: str, out: Tensor) -> None:
        """out [T, F] = activation(x): those of ``activate``, or "relu"."""
        ...

    def sigmoid_mul(self, gate: Tensor, x: Tensor, out: Tensor) -> None:
        """out [T, F] = sigmoid(gate) * x, of gates [T, F] or [T, 1]."""
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
        """out [T, K] = what the experts that ``logits`` (float32 [T, E]) choose make of x [T, K],
        and the residual [T, K], which may lie where ``out`` does. Rows that only fill up a step
        need not be run."""
        ...

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
        """Of qkv [T, (H + 2 Hk) D], heads of queries and keys are normed and rotated; keys and
        values go to the step's slots of a layer's ``group``, and queries to q_out [T, H, D], for
        ``Attend``."""
        ...

    def plan_attention(self, step: StepTensors) -> Attend:
        """What the layers of a step have in common."""
        ...

    def find_damage(self, x: Tensor, damaged: Tensor) -> None:
        """damaged (int32 [T]) = 1 where a row of x [T, K] has a NaN or an infinity, else 0."""
        ...

    def reset(self) -> None:
        """Put what launches count in back to its start, after a step of which some launches may be
        missing: a sum that is left half counted would be taken too early by the next step."""
        ...

    def softcap(self, logits: Tensor, cap: float) -> None:
        """cap * tanh(logits / cap), in place of float32 logits [R, V]."""
        ...


@runtime_checkable
class LatentOps(Protocol):
    """What ops need besides, for models with latent attention."""

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
        """Rows of ckv [T, C + R], normed and rotated, go to the step's slots of a layer's
        ``group``; q [T, H, P + R] is attended to all rows that are there: to out [T, H, V]."""
        ...
