"""A model's step on a device: its fused ops as launches over memory that stays in place.

    Linear        (the norm of a sum >) one product with all of its matrices, side by side
    Attention     norms of heads, rotation, the writing of KV > attention
    Rows, Check   one op each
    Sum           parts of a product, added up over the ranks of a group, to the residual
    Head          requested rows > norm > product > softcap

All outputs are allocated in advance, so a step allocates nothing, and a CUDA graph of it can be
replayed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import fused_ops
from octavo.kernels.cuda.attention_plan import Scoring
from octavo.kernels.cuda.buffers import Buffers
from octavo.kernels.cuda.device_group import ALONE, DeviceGroup, add_in_pairs
from octavo.kernels.cuda.ops import (
    Attend,
    AttentionLayer,
    ExpertLayer,
    HeadNorms,
    LatentLayer,
    LatentOps,
    LayerStores,
    Rope,
    StepOps,
    StepTensors,
)
from octavo.kernels.cuda.products import GemmFusion
from octavo.kernels.cuda.weights import DeviceWeight
from octavo.kernels.fused_ops import CannotFuse, FusedOp, WeightRef
from octavo.kernels.op_arguments import RowNorm
from octavo.kernels.recorder import RopeTable, Value


class _Running(NamedTuple):
    """A step that is being computed: its planned attention, and its rows of all tensors."""

    step: StepTensors
    attend: Attend
    rows: Sequence[Tensor]


_Launch = Callable[[_Running], None]
"""Something that is launched for a step."""

# Activations without a product: names of kernels, and kinds of FusedRows.
_ALONE = {("gelu_erf" if name == "gelu" else name): kind for name, kind in fused_ops.ALONE.items()}


class FusedProgram:
    """A model's step, computed by the ops of one device.

    Args:
        ops: from ``fuser.fuse``.
        kernels: compute the ops.
        weight_of: returns matrices stacked in one; the same object for the same matrices.
        dtype: of activations.
        max_tokens: of a step.
        max_rows: for which logits are computed at once.
        max_positions: of a sequence. Rotations are computed for all of them, once.
        kept: values that :meth:`buffer` can return after a step.
        group: the ranks that compute a step together, of which ``ops`` are one's.

    Raises:
        CannotFuse: the kernels do not support an op; says why.
    """

    def __init__(
        self,
        ops: Sequence[FusedOp],
        kernels: StepOps,
        weight_of: Callable[[Sequence[WeightRef]], DeviceWeight],
        kv_cache: LayerStores,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        max_rows: int,
        max_positions: int,
        kept: Collection[Value] = (),
        group: DeviceGroup = ALONE,
    ):
        self._kernels, self._weight_of, self._kv_cache = kernels, weight_of, kv_cache
        self._group = group
        self._dtype, self._device = dtype, device
        self._max_tokens = max_tokens
        self._constants = _Constants(device, max_positions)
        head = ops[-1]
        assert isinstance(head, fused_ops.FusedHead)
        # Hidden states of the requested rows.
        self._hidden = torch.zeros(max_rows, head.source.width, dtype=dtype, device=device)
        self._logits_of_ranks = self._room_for_logits(head, max_rows)
        self._sums_of_ranks = self._room_for_sums(ops)
        # 1 where the activations of a token are NaN or infinite.
        self.damaged = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._build(ops, kept)

    def exit_after(self, num_layers: int) -> FusedProgram:
        """The program of the first layers and the head, with the same weights and KV cache.

        Both programs use the same memory, so that each overwrites the other's activations, except
        kept values.

        Raises:
            CannotFuse: the model cannot end there.
        """
        program = copy.copy(self)
        program._build(fused_ops.exit_after(self.ops, num_layers), (), self._buffers)
        return program

    def run(self, step: StepTensors) -> None:
        """Compute a step without its head. Its results are valid until the next step."""
        running = _Running(
            step, self._kernels.plan_attention(step), self._tensors.cut(step.num_tokens)
        )
        for launch in self._launches:
            launch(running)

    def reset(self) -> None:
        """Restore the state of kernels after a step of which some launches may be missing."""
        self._kernels.reset()

    def logits(self, rows: Tensor, out: Tensor) -> None:
        """Compute logits of ``rows`` (int32 [R]) of the last step, to out (float32 [R, V]); of a
        group, all ranks have to, and rank 0 gets them."""
        head, hidden = self._head, self._hidden[: len(rows)]
        source = self._buffers.tensor(head.source)
        if self._head_norm is None:
            torch.index_select(source, 0, rows, out=hidden)
        else:
            self._kernels.norm(source, self._head_norm, hidden, rows)
        if self._logits_of_ranks is None:
            self._kernels.products.linear(hidden, self._head_weight, out, GemmFusion())
        else:
            self._gather_logits(hidden, self._logits_of_ranks[:, : len(rows)], out)
        if head.scale is not None:
            out.mul_(head.scale)
        if head.softcap is not None:
            self._kernels.softcap(out, head.softcap)

    def _gather_logits(self, hidden: Tensor, made: Tensor, out: Tensor) -> None:
        """Compute the rank's logits, and have rank 0 gather those of all.

        ``made``: [ranks, R, most tokens of a rank], of others than rank 0 [1, ...].
        """
        own = made[0]  # rank 0's own place, too
        width = self._head.weight.shape[0]
        self._kernels.products.linear(hidden, self._head_weight, own[:, :width], GemmFusion())
        if self._group.gather(own, made):
            for tokens, logits in zip(self._head.tokens_of_ranks, made, strict=True):
                out[:, tokens.start : tokens.stop].copy_(logits[:, : len(tokens)])

    def buffer(self, value: Value) -> Tensor:
        """Activations of a kept value, or of an input: [max_tokens, width]."""
        return self._buffers.tensor(value)

    @property
    def ops_per_token(self) -> float:
        """Operations of the products with the weights of layers, for each token of a step."""
        return 2.0 * sum(map(_values_per_token, self.ops))

    @property
    def num_bytes(self) -> int:
        """Bytes of activations."""
        own = self._hidden, self.damaged, self._logits_of_ranks, self._sums_of_ranks
        return self._buffers.num_bytes + sum(each.nbytes for each in own if each is not None)

    def _room_for_logits(self, head: fused_ops.FusedHead, max_rows: int) -> Tensor | None:
        """Float32 [ranks, rows, most tokens of a rank], or [1, ...]; None if a rank has all."""
        if not head.tokens_of_ranks:
            return None
        count = self._group.size if self._group.rank == 0 else 1
        most = max(map(len, head.tokens_of_ranks))
        return torch.zeros(count, max_rows, most, device=self._device)

    def _room_for_sums(self, ops: Sequence[FusedOp]) -> Tensor | None:
        """Float32 [ranks x max_tokens x width], for canonical sums over ranks."""
        sums = [op for op in ops if isinstance(op, fused_ops.FusedSum)]
        widths = [op.out.width for op in sums if op.is_divided and op.is_canonical]
        size = self._group.size * self._max_tokens * max(widths, default=0)
        return torch.zeros(size, device=self._device) if size else None

    def _build(
        self, ops: Sequence[FusedOp], kept: Collection[Value], lent: Buffers | None = None
    ) -> None:
        head = ops[-1]
        assert isinstance(head, fused_ops.FusedHead)
        self.ops, self._head = ops, head
        self.vocab_size = head.vocab_size
        self._buffers = Buffers(ops, self._max_tokens, self._dtype, self._device, kept, lent)
        self._tensors = _Tensors()
        self._launches = [launch for op in ops for launch in self._launches_of(op)]
        self._head_norm, self._head_weight = self._norm(head.norm), self._weight_of([head.weight])

    def _launches_of(self, op: FusedOp) -> Iterator[_Launch]:
        match op:
            case fused_ops.FusedEmbedding():
                yield from self._embed(op)
            case fused_ops.FusedLinear():
                yield from self._linear(op)
            case fused_ops.FusedAttention():
                yield from self._attention(op)
            case fused_ops.FusedLatentAttention():
                yield self._latent_attention(op)
            case fused_ops.FusedRows():
                yield self._rows(op)
            case fused_ops.FusedCheck():
                source = self._buffers.tensor(op.source)
                yield self._each_row(self._kernels.find_damage, source, self.damaged)
            case fused_ops.FusedExperts():
                yield from self._experts(op)
            case fused_ops.FusedSum():
                yield self._sum_of_parts(op)
            case fused_ops.FusedHead():
                pass  # ``logits`` computes it

    def _embed(self, op: fused_ops.FusedEmbedding) -> Iterator[_Launch]:
        rows, table = self._kernels.products.rows, self._weight_of([op.weight])
        out = self._buffers.tensor(op.out)
        (at,) = self._tensors.places(out)
        if op.token_ids is None:
            yield lambda running: rows(table, running.step.token_ids, running.rows[at])
        else:
            yield self._embed_own(op.token_ids, table, out)
        if op.scale != 1.0:
            # Rounded to the activations' type first, as models with one were trained.
            scale = torch.tensor(op.scale, dtype=self._dtype).item()
            yield self._each_row(lambda x: x.mul_(scale), out)
        if op.positions is not None:
            yield self._embed_positions(op.positions, op.position_offset, out)

    def _embed_own(self, own: range, table: DeviceWeight, out: Tensor) -> _Launch:
        """Embeds the tokens that the rank has, and adds up what all ranks have: zeros, but of
        one."""
        rows, group = self._kernels.products.rows, self._group
        ids = torch.zeros(self._max_tokens, dtype=torch.int32, device=self._device)
        is_other = torch.zeros(self._max_tokens, 1, dtype=torch.bool, device=self._device)
        places = self._tensors.places(ids, is_other, out)

        def embed(running: _Running) -> None:
            at, others, made = (running.rows[place] for place in places)
            torch.sub(running.step.token_ids, own.start, out=at)
            torch.ne(at.clamp(0, len(own) - 1), at, out=others[:, 0])
            at.clamp_(0, len(own) - 1)
            rows(table, at, made)
            made.masked_fill_(others, 0)
            group.sum(made)

        return embed

    def _embed_positions(self, matrix: WeightRef, offset: int, out: Tensor) -> _Launch:
        rows, table = self._kernels.products.rows, self._weight_of([matrix])
        ids = torch.zeros(self._max_tokens, dtype=torch.int32, device=self._device)
        places = self._tensors.places(ids, self._buffers.between(out.shape[1]), out)

        def embed_positions(running: _Running) -> None:
            ids, learned, made = (running.rows[place] for place in places)
            torch.add(running.step.positions, offset, out=ids)
            rows(table, ids, learned)
            made.add_(learned)

        return embed_positions

    def _linear(self, op: fused_ops.FusedLinear) -> Iterator[_Launch]:
        source, norm = self._buffers.tensor(op.source), self._norm(op.norm)
        if op.first_input or op.segments[0].weight.shape[1] < op.source.width:
            source = source[:, op.first_input :][:, : op.segments[0].weight.shape[1]]
        if op.added is not None and norm is None:
            assert op.sum_out is not None
            yield from self._sum(op)
            source = self._buffers.tensor(op.sum_out)
        elif op.added is not None:
            normed = self._buffers.between(op.source.width)
            yield self._add_norm(op, normed)
            source, norm = normed, None
        out = self._outputs(op)
        weight = self._weight_of([segment.weight for segment in op.segments])
        bias, linear = self._bias(op.segments), self._kernels.products.linear
        if op.scale is not None:
            yield from self._scaled_linear(op, source, weight, GemmFusion(norm, bias), out)
            return
        if op.residual is not None:
            yield from self._residual(op, out)
        fusion = GemmFusion(norm, bias, op.activation, accumulate=op.residual is not None)
        yield self._each_row(lambda x, y: linear(x, weight, y, fusion), source, out)

    def _residual(self, op: fused_ops.FusedLinear, out: Tensor) -> Iterator[_Launch]:
        """Copies the residual to the output of a product, unless both have the same place."""
        assert op.residual is not None
        if not self._buffers.is_same(op.residual, op.segments[0].out):
            yield self._each_row(Tensor.copy_, out, self._buffers.tensor(op.residual))

    def _scaled_linear(
        self,
        op: fused_ops.FusedLinear,
        source: Tensor,
        weight: DeviceWeight,
        fusion: GemmFusion,
        out: Tensor,
    ) -> Iterator[_Launch]:
        linear, scale = self._kernels.products.linear, op.scale
        product = self._buffers.between(out.shape[1])
        yield self._each_row(lambda x, y: linear(x, weight, y, fusion), source, product)
        yield from self._residual(op, out)
        yield self._each_row(lambda x, y: x.add_(y, alpha=scale), out, product)

    def _sum_of_parts(self, op: fused_ops.FusedSum) -> _Launch:
        """Adds up the parts of a product. Their own tensors keep what comes in between: nothing
        else reads them."""
        group, gathered, scale = self._group, self._sums_of_ranks, op.scale
        tensors = [self._buffers.tensor(value) for value in (op.out, *op.terms)]
        residual = None if op.residual is None else self._buffers.tensor(op.residual)
        places = self._tensors.places(*tensors, *([] if residual is None else [residual]))
        num_terms = len(op.terms)

        def sum_of_parts(running: _Running) -> None:
            out, *terms = (running.rows[place] for place in places)
            before = terms[num_terms:]
            total = add_in_pairs(terms[:num_terms])
            if op.is_divided and op.is_canonical:
                assert gathered is not None
                of_ranks = gathered[: group.size * total.numel()].view(-1, *total.shape)
                group.gather_everywhere(total, of_ranks)
                total = add_in_pairs(list(of_ranks))
            elif op.is_divided:
                group.sum(total)
            if before:
                total = torch.add(before[0], total, alpha=1.0 if scale is None else scale)
            elif scale is not None:
                total = total.mul_(scale)
            out.copy_(total)

        return sum_of_parts

    def _sum(self, op: fused_ops.FusedLinear) -> Iterator[_Launch]:
        """Launches of a linear's input sum that has no norm behind it."""
        kernels, y_norm = self._kernels, self._norm(op.added_norm)
        assert op.added is not None and op.sum_out is not None
        x, y, total = map(self._buffers.tensor, (op.source, op.added, op.sum_out))
        if y_norm is not None:
            normed = self._buffers.between(y.shape[1])
            yield self._each_row(lambda y, out: kernels.norm(y, y_norm, out), y, normed)
            y = normed
        yield self._each_row(lambda x, y, out: torch.add(x, y, out=out), x, y, total)

    def _add_norm(self, op: fused_ops.FusedLinear, normed: Tensor) -> _Launch:
        assert op.added is not None and op.sum_out is not None
        sum_of = map(self._buffers.tensor, (op.source, op.added, op.sum_out))
        norm, y_norm = self._norm(op.norm), self._norm(op.added_norm)
        assert norm is not None
        add_norm = self._kernels.add_norm
        return self._each_row(
            lambda x, y, total, out: add_norm(x, y, y_norm, total, norm, out), *sum_of, normed
        )

    def _outputs(self, op: fused_ops.FusedLinear) -> Tensor:
        """Tensor of a linear's outputs side by side, or of its activation."""
        if op.activation is not None:
            return self._buffers.tensor(op.segments[0].out)
        return self._buffers.joint([segment.out for segment in op.segments])

    def _attention(self, op: fused_ops.FusedAttention) -> Iterator[_Launch]:
        kernels, layer = self._kernels, self._attention_layer(op)
        parts = op.q, op.k, op.v
        if self._buffers.are_joint(parts):
            qkv, q = self._buffers.joint(parts), self._buffers.between(op.q.width)
        else:  # norms of whole rows have made them
            widths = op.q.width, sum(part.width for part in parts)
            q, qkv = self._buffers.rooms_between(*widths)
            yield self._each_row(
                lambda q, k, v, out: torch.cat([q, k, v], dim=1, out=out),
                *map(self._buffers.tensor, parts),
                qkv,
            )
        places = self._tensors.places(
            qkv,
            q.unflatten(1, op.q.shape),
            self._buffers.tensor(op.out).unflatten(1, op.q.shape),
        )

        def attention(running: _Running) -> None:
            qkv, q, attended = (running.rows[place] for place in places)
            kernels.write_kv(qkv, running.step, layer, q)
            running.attend(q, layer, attended)

        yield attention

    def _attention_layer(self, op: fused_ops.FusedAttention) -> AttentionLayer:
        sinks = None if op.sinks is None else self._constants.vector(op.sinks)
        return AttentionLayer(
            *self._kv_cache.layer(op.layer),
            Scoring(op.scale, op.window, op.softcap, sinks),
            self._head_norms(op),
            None if op.rope is None else self._rope(op.rope, op.interleaved),
            self._kv_cache.group_of(op.layer),
        )

    def _latent_attention(self, op: fused_ops.FusedLatentAttention) -> _Launch:
        if not isinstance(self._kernels, LatentOps):
            raise CannotFuse("these ops have no latent attention")
        attend, norm = self._kernels.attend_latents, self._norm(op.norm)
        assert norm is not None
        layer = LatentLayer(
            self._weight_of([op.kv_b]),
            norm,
            self._rope(op.rope, op.interleaved),
            op.scale,
            *self._kv_cache.layer(op.layer),
            self._kv_cache.group_of(op.layer),
        )
        places = self._tensors.places(
            self._buffers.tensor(op.q).unflatten(1, op.q.shape),
            self._buffers.tensor(op.ckv),
            self._buffers.tensor(op.out).unflatten(1, (op.q.shape[0], -1)),
        )

        def latent_attention(running: _Running) -> None:
            q, ckv, out = (running.rows[place] for place in places)
            attend(q, ckv, running.step, layer, out)

        return latent_attention

    def _experts(self, op: fused_ops.FusedExperts) -> Iterator[_Launch]:
        source, norm = self._buffers.tensor(op.source), self._norm(op.norm)
        kernels, layer = self._kernels, self._expert_layer(op)
        if norm is not None:
            normed = self._buffers.between(op.source.width)
            yield self._each_row(lambda x, y: kernels.norm(x, norm, y), source, normed)
            source = normed
        logits, out = map(self._buffers.tensor, (op.logits, op.out))
        residual = out if op.residual is None else self._buffers.tensor(op.residual)
        places, has_residual = self._tensors.places(source, logits, residual, out), op.residual

        def experts(running: _Running) -> None:
            x, scores, before, made = (running.rows[place] for place in places)
            added = None if has_residual is None else before
            kernels.run_experts(x, scores, running.step, layer, added, made)

        yield experts

    def _expert_layer(self, op: fused_ops.FusedExperts) -> ExpertLayer:
        experts = op.experts
        return ExpertLayer(
            self._weight_of([matrix for each in experts for matrix in (each.gate, each.up)]),
            self._weight_of([each.down for each in experts]),
            op.routing,
            op.activation,
            self._joint_vector([bias for e in experts for bias in (e.gate_bias, e.up_bias)]),
            self._joint_vector([each.down_bias for each in experts]),
            None if op.correction is None else self._constants.vector(op.correction),
        )

    def _joint_vector(self, parts: Sequence[np.ndarray | None]) -> Tensor | None:
        """Concatenate parts, which are all present or all None."""
        there = [part for part in parts if part is not None]
        return self._constants.vector(np.concatenate(there)) if there else None

    def _rows(self, op: fused_ops.FusedRows) -> _Launch:
        kernels, kind = self._kernels, op.kind
        a, out = self._buffers.tensor(op.a), self._buffers.tensor(op.out)
        if op.norm is not None:
            return self._norm_rows(op, op.norm, a, out)
        if kind == "scale":
            return self._each_row(lambda a, out: torch.mul(a, op.factor, out=out), a, out)
        if op.b is None:
            activation = next(name for name, alone in _ALONE.items() if alone == kind)
            return self._each_row(lambda a, out: kernels.activate_alone(a, activation, out), a, out)
        b = self._buffers.tensor(op.b)
        if kind == "add":
            return self._each_row(lambda a, b, out: torch.add(a, b, out=out), a, b, out)
        if kind == "sigmoid":
            return self._each_row(lambda a, b, out: kernels.sigmoid_mul(b, a, out), a, b, out)
        return self._each_row(lambda a, b, out: kernels.activate(a, b, kind, out), a, b, out)

    def _norm_rows(
        self, op: fused_ops.FusedRows, of: fused_ops.FusedNorm, a: Tensor, out: Tensor
    ) -> _Launch:
        if len(op.a.shape) > 1:
            raise CannotFuse("norms of heads are made with attention, and not alone")
        kernels, norm = self._kernels, RowNorm(self._constants.vector(of.weight), of.eps)
        if op.kind == "norm":
            return self._each_row(lambda a, out: kernels.norm(a, norm, out), a, out)
        bias = None if op.bias is None else self._constants.vector(op.bias)
        return self._each_row(lambda a, out: kernels.layernorm(a, norm, bias, out), a, out)

    def _head_norms(self, op: fused_ops.FusedAttention) -> HeadNorms | None:
        q, k = self._norm(op.q_norm), self._norm(op.k_norm)
        if q is None and k is None:
            return None
        if q is None or k is None or q.eps != k.eps:
            raise CannotFuse(f"queries and keys of layer {op.layer} are not normed alike")
        return HeadNorms(q.weight, k.weight, q.eps)

    def _rope(self, table: RopeTable, interleaved: bool) -> Rope:
        return Rope(self._constants.rotations(table), interleaved)

    def _norm(self, norm: fused_ops.FusedNorm | None) -> RowNorm | None:
        return None if norm is None else RowNorm(self._constants.vector(norm.weight), norm.eps)

    def _bias(self, segments: Sequence[fused_ops.FusedSegment]) -> Tensor | None:
        if all(segment.bias is None for segment in segments):
            return None
        parts = [
            np.zeros(s.weight.shape[0], np.float32) if s.bias is None else s.bias for s in segments
        ]
        return torch.from_numpy(np.concatenate(parts)).to(self._device, self._dtype)

    def _each_row(self, op: Callable[..., object], *tensors: Tensor) -> _Launch:
        """A launch of ``op`` over as many rows of tensors [max_tokens, ...] as a step has
        tokens."""
        places = self._tensors.places(*tensors)

        def part(running: _Running) -> None:
            op(*[running.rows[place] for place in places])

        return part


def _values_per_token(op: FusedOp) -> int:
    """Values of the matrices that each token of a step is multiplied with."""
    match op:
        case fused_ops.FusedLinear():
            weights = [segment.weight for segment in op.segments]
            times = 1
        case fused_ops.FusedExperts():
            expert = op.experts[0]
            weights, times = [expert.gate, expert.up, expert.down], op.routing.top_k
        case _:
            return 0
    return times * sum(math.prod(weight.shape) for weight in weights)


class _Tensors:
    """Tensors [max_tokens, ...], each cut to the rows of a step once for all launches.

    Layers use the same tensors in turn, and cutting one takes as long as calling a launch.
    """

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._places: dict[Hashable, int] = {}

    def places(self, *tensors: Tensor) -> list[int]:
        """Indices of tensors in the result of :meth:`cut`."""
        return [self._place(tensor) for tensor in tensors]

    def cut(self, count: int) -> list[Tensor]:
        return [tensor[:count] for tensor in self._all]

    def _place(self, tensor: Tensor) -> int:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._places:
            self._places[key] = len(self._all)
            self._all.append(tensor)
        return self._places[key]


class _Constants:
    """Small arrays on the device, as float32; an array that several ops use is uploaded once."""

    def __init__(self, device: torch.device, max_positions: int):
        self._device, self._max_positions = device, max_positions
        self._vectors: dict[int, tuple[np.ndarray, Tensor]] = {}  # by id; the array is kept alive
        self._rotations: dict[RopeTable, Tensor] = {}

    def vector(self, values: np.ndarray) -> Tensor:
        if id(values) not in self._vectors:
            self._vectors[id(values)] = values, self._tensor(values)
        return self._vectors[id(values)][1]

    def rotations(self, table: RopeTable) -> Tensor:
        """Cosines and sines, float32 [max_positions, rotary]."""
        if table not in self._rotations:
            values = table.make(self._max_positions)[: self._max_positions]
            self._rotations[table] = self._tensor(values)
        return self._rotations[table]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)
