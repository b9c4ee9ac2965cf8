"""``RankModel``: the part of a model on one rank, as far as the time of its steps depends on it.

It stands between shapes and time. Plans make it from a shape, a precision and a layout, an engine
from the matrices that it has loaded, and step times are computed from it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.cost.parallel import Parallel

# What a matrix product is computed in, by the peak of the hardware that bounds it.
Arithmetic = Literal["fp32", "fp16", "fp8", "fp4", "int8"]

EXCHANGED_BYTES = 4  # of a number between ranks


@dataclass(frozen=True, slots=True)
class Experts:
    """Matrices of which a token uses some.

    ``on_rank`` of the layer's ``total`` experts are on this rank; a token uses ``per_token``.
    """

    total: int
    per_token: int
    on_rank: int


@dataclass(frozen=True, slots=True)
class MatrixOp:
    """A matrix product that a step computes ``count`` times, once in each layer that has it.

    Args:
        name: such as ``attention.qkv``, ``mlp.down``, ``experts.gate_up``, ``head``.
        inputs, outputs: of a row, on this rank (of one expert).
        num_params: of all that lies on this rank, in one layer (with experts: of all of them here).
        num_bytes: that these take, scales included.
        arithmetic: what the products are computed in.
        sampled_only: it is computed for rows from which a token is sampled: the head.
        experts: None where every row uses all of it.
        num_sharing: ranks that share out the rows by their requests, each with the whole matrix.
    """

    name: str
    count: int
    inputs: int
    outputs: int
    num_params: int
    num_bytes: float
    arithmetic: Arithmetic = "fp16"
    sampled_only: bool = False
    experts: Experts | None = None
    num_sharing: int = 1


@dataclass(frozen=True, slots=True)
class AttentionOp:
    """Attention in ``count`` layers that see the same positions, on this rank.

    Args:
        name: ``attention``, or ``attention.window`` and the like.
        flops_per_score: in one layer, for one query and one key that it sees: 4 x heads x head
            dimension; of latent attention when prompts are expanded.
        decode_flops_per_score: the same for single tokens; of latent attention, absorbed.
        kv_bytes_per_token: in one layer, read for each key that is seen and written for each token.
        window: the last positions that a query sees, its own included; None is all.
        selected: how many of them it looks at; all are kept. None is all.
        state_bytes: in one layer, of a recurrent state: read and written for each sequence of a
            step, whatever its length.
        num_sharing: ranks that have requests of their own, each with those of its own alone.
    """

    name: str
    count: int
    flops_per_score: float
    kv_bytes_per_token: float
    decode_flops_per_score: float | None = None
    window: int | None = None
    state_bytes: float = 0.0
    selected: int | None = None
    num_sharing: int = 1

    @property
    def reach(self) -> int | None:
        """Positions that a query looks at, at most; None is all."""
        return min((each for each in (self.window, self.selected) if each), default=None)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Numbers that all ranks together write into shared memory, where the others read them (scheme
    `gather`). They are 32-bit floats, each written once.

    Args:
        token_values: numbers of each token of a pass, in all layers.
        row_values: numbers of each row of logits, which rank 0 reads.
        meetings: barriers of all ranks in a pass, after which what was written may be read; where
            logits are made, there is one more.
    """

    token_values: int
    row_values: int
    meetings: int

    @property
    def token_bytes(self) -> int:
        return EXCHANGED_BYTES * self.token_values

    @property
    def row_bytes(self) -> int:
        return EXCHANGED_BYTES * self.row_values


@dataclass(frozen=True, slots=True)
class RankModel:
    """The work of one rank. Of pipelines, of the rank that has most to do.

    Args:
        hidden_size, num_layers: ``num_layers`` on this rank; for norms, and what is communicated.
        activation_bytes: of one number between matrix products.
        num_moe_layers: on this rank, whose rows are sent to experts elsewhere and back.
        exchange: between ranks on processors; None where they add up results, or there is one.
        sent_rows: rows of the hidden size that stages send to the next ones for a token, all stages
            together; of one stage, those of that one.
    """

    matrices: tuple[MatrixOp, ...]
    attention: tuple[AttentionOp, ...]
    hidden_size: int
    vocab_size: int
    num_layers: int
    activation_bytes: float = 2.0
    num_moe_layers: int = 0
    parallel: Parallel = Parallel()
    exchange: Exchange | None = None
    sent_rows: int = 0

    @property
    def weights_bytes(self) -> float:
        """Bytes of all matrices, experts that a step may not use included."""
        return sum(each.count * each.num_bytes for each in self.matrices)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of one token in all layers of this rank whose windows it lies in."""
        return sum(each.count * each.kv_bytes_per_token for each in self.attention)
