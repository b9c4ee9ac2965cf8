"""The fused ops of a step as structs that the native library executes, and their activations.

One :class:`Program` serves every step of a model: what differs between steps (tokens, lengths,
block tables, rows to sample) is in the ``oct_batch`` of each call.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.kernels import fused_ops
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.latent_weights import LatentWeights
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.recurrence import StateLayout, recurrence_struct
from octavo.kernels.fused_ops import FusedNorm, FusedOp, WeightRef
from octavo.kernels.recorder import RopeTable, Value
from octavo.kernels.routing import CLAMPED_SWIGLU, ExpertWeights, Routing

_EPILOGUES = {
    None: abi.OCT_EPI_NONE,
    "silu": abi.OCT_EPI_SILU_MUL,
    "gelu_tanh": abi.OCT_EPI_GELU_TANH_MUL,
    "gelu_erf": abi.OCT_EPI_GELU_ERF_MUL,
    CLAMPED_SWIGLU: abi.OCT_EPI_CLAMPED_SWIGLU,
}
_ROWS = {
    "norm": abi.OCT_ROWS_NORM,
    "add": abi.OCT_ROWS_ADD,
    "silu": abi.OCT_ROWS_SILU_MUL,
    "gelu_tanh": abi.OCT_ROWS_GELU_TANH_MUL,
    "gelu_erf": abi.OCT_ROWS_GELU_ERF_MUL,
    "layernorm": abi.OCT_ROWS_LAYERNORM,
    "scale": abi.OCT_ROWS_SCALE,
    "silu_alone": abi.OCT_ROWS_SILU,
    "gelu_tanh_alone": abi.OCT_ROWS_GELU_TANH,
    "gelu_erf_alone": abi.OCT_ROWS_GELU_ERF,
    "relu_alone": abi.OCT_ROWS_RELU,
    "sigmoid": abi.OCT_ROWS_SIGMOID_MUL,
}
_SCORING = {"softmax": abi.OCT_SCORE_SOFTMAX, "sigmoid": abi.OCT_SCORE_SIGMOID}
_ALIGNMENT = 64
_EXPERTS = ctypes.POINTER(abi.ExpertsArgs)
_LATENT = ctypes.POINTER(abi.LatentArgs)
_EMBED, _LINEAR = ctypes.POINTER(abi.EmbedArgs), ctypes.POINTER(abi.LinearArgs)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Addresses of the KV cache for the native kernels; see ``oct_attention_args``."""

    format: int  # OCT_KV_*
    num_kv_heads: int
    head_dim: int  # values of a head, with zeros up to a multiple of 16
    num_blocks: int
    block_bytes: int  # from one block to the next
    layers: list[int]  # the address of each layer's part of the first block
    groups: list[int]  # the group of each layer, whose block tables it uses
    states: StateLayout | None = None  # of recurrent layers


class Program:
    """A model's step, for the kernels of one library.

    ``packed(weight)`` returns the struct of a weight that was packed before; it must stay valid as
    long as the program. ``kept`` are values that :meth:`buffer` can return after a step, in
    addition to those of the head and of inputs.
    """

    def __init__(
        self,
        ops: Sequence[FusedOp],
        library: Library,
        pool: Pool,
        kv: KVLayout,
        packed: Callable[[WeightRef], abi.Weight],
        max_tokens: int,
        kept: Collection[Value] = (),
        latent_weights: LatentWeights | None = None,
    ):
        self.library, self.pool = library, pool
        self.ops, self.num_ops = ops, len(ops)
        self.max_tokens = max_tokens
        head = ops[-1]
        assert isinstance(head, fused_ops.FusedHead)
        self.vocab_size = head.weight.shape[0]
        self._packed = packed
        self._latent_weights = latent_weights or LatentWeights(packed, library, pool)
        self.kv = kv
        self._kept: list[object] = []  # what the structs point to
        self._tables: list[tuple[abi.AttentionArgs | abi.LatentArgs, RopeTable]] = []
        self._cos_sin: list[np.ndarray] = []  # of each of these, as long as steps read it
        self._num_positions = 0
        self.seconds = 0.0  # spent in steps so far
        # For each op of experts, the tokens that each expert has processed so far: int64 [E].
        self.expert_loads: list[np.ndarray] = []
        self._buffers = _Arena(ops, max_tokens, kept)
        nodes = (abi.Node * len(ops))()
        for node, op in zip(nodes, ops, strict=True):
            node.op, arguments = self._arguments(op)
            self._kept.append(arguments)
            node.args = ctypes.addressof(arguments)
        self._struct = abi.Program(nodes, len(ops), 1, self.vocab_size, max_tokens)
        self._kept.append(nodes)

    def exit_after(self, num_layers: int) -> Program:
        """The program of the first layers and the head, with the same weights and KV cache."""
        ops = fused_ops.exit_after(self.ops, num_layers)
        return Program(
            ops,
            self.library,
            self.pool,
            self.kv,
            self._packed,
            self.max_tokens,
            latent_weights=self._latent_weights,
        )

    def step(self, batch: abi.Batch, max_seq_len: int) -> None:
        """Run a batch whose longest sequence has ``max_seq_len`` positions."""
        if max_seq_len > self._num_positions:
            self._extend_tables(max_seq_len)
        begin = time.perf_counter()
        code = self.library.lib.oct_step(self.pool, ctypes.byref(self._struct), ctypes.byref(batch))
        self.seconds += time.perf_counter() - begin
        self.library.check(code)

    def logprob_rows(self, count: int, logits: int, token_ids: int, logprobs: int) -> None:
        """Compute log-probabilities of rows of logits: arrays of ``count`` entries, by their
        addresses."""
        begin = time.perf_counter()
        code = self.library.lib.oct_logprob_rows(
            self.pool, count, self.vocab_size, logits, token_ids, logprobs
        )
        self.seconds += time.perf_counter() - begin
        self.library.check(code)

    def weights(self) -> Iterator[tuple[int, abi.Weight, tuple[int, int] | None]]:
        """Yields every packed matrix that a step uses, with the op (OCT_OP_*) that reads it and,
        for experts, the number of experts that a token uses and of all. Latent attention has its
        own layout (``latent_weights.py``), so its struct has no data."""
        for index in range(self.num_ops):
            node = self._struct.nodes[index]
            if node.op == abi.OCT_OP_EMBED:
                embed = ctypes.cast(node.args, _EMBED).contents
                yield node.op, embed.table, None
                if embed.positions.data:
                    yield node.op, embed.positions, None
            elif node.op in (abi.OCT_OP_LINEAR, abi.OCT_OP_HEAD):
                linear = ctypes.cast(node.args, _LINEAR).contents
                for segment in linear.segments[: linear.num_segments]:
                    yield node.op, segment.weight, None
            elif node.op == abi.OCT_OP_EXPERTS:
                arguments = ctypes.cast(node.args, _EXPERTS).contents
                routing = arguments.routing
                share = routing.top_k, routing.num_experts
                for expert in arguments.experts[: routing.num_experts]:
                    for weight in (expert.gate, expert.up, expert.down):
                        yield node.op, weight, share
            elif node.op == abi.OCT_OP_LATENT:
                latent = ctypes.cast(node.args, _LATENT).contents
                outputs = latent.num_heads * (latent.nope_dim + latent.value_dim)
                yield node.op, abi.Weight(latent.weight_format, outputs, latent.rank), None

    def buffer(self, value: Value) -> np.ndarray:
        """Activations of a value, float32 [max_tokens, width], as the last step left them; for an
        input, where the next step reads it."""
        return self._buffers.array(value)

    def _extend_tables(self, num_positions: int) -> None:
        # Many layers share one table. Its owner may replace it, for another program too, so it is
        # kept alive here; tables that were too short are released.
        tables = [rope.make(num_positions) for _, rope in self._tables]
        for (arguments, _), table in zip(self._tables, tables, strict=True):
            assert table.dtype == np.float32 and table.flags.c_contiguous
            arguments.cos_sin = table.ctypes.data
        self._cos_sin = tables
        self._num_positions = min((table.shape[0] for table in tables), default=num_positions)

    def _arguments(self, op: FusedOp) -> tuple[int, ctypes.Structure]:
        match op:
            case fused_ops.FusedEmbedding():
                return abi.OCT_OP_EMBED, self._embed(op)
            case fused_ops.FusedLinear():
                return abi.OCT_OP_LINEAR, self._linear(op)
            case fused_ops.FusedAttention():
                return abi.OCT_OP_ATTENTION, self._attention(op)
            case fused_ops.FusedRows():
                return abi.OCT_OP_ROWS, self._rows(op)
            case fused_ops.FusedCheck():
                return abi.OCT_OP_CHECK, abi.CheckArgs(x=self._at(op.source), width=op.source.width)
            case fused_ops.FusedHead():
                return abi.OCT_OP_HEAD, self._head(op)
            case fused_ops.FusedLatentAttention():
                return abi.OCT_OP_LATENT, self._latent(op)
            case fused_ops.FusedExperts():
                return abi.OCT_OP_EXPERTS, self._experts(op)
            case fused_ops.FusedRecurrence():
                return recurrence_struct(op, self._at, self._constant, self.kv.states)

    def _embed(self, op: fused_ops.FusedEmbedding) -> abi.EmbedArgs:
        arguments = abi.EmbedArgs(
            table=self._packed(op.weight), scale=op.scale, out=self._at(op.out)
        )
        if op.positions is not None:
            arguments.positions = self._packed(op.positions)
            arguments.position_offset = op.position_offset
        return arguments

    def _linear(self, op: fused_ops.FusedLinear) -> abi.LinearArgs:
        arguments = self._input(op.source, op.norm, op.remainder_above)
        if op.added is not None:
            assert op.sum_out is not None
            arguments.add = self._at(op.added)
            arguments.x_out = self._at(op.sum_out)
            if op.added_norm is not None:
                arguments.add_norm = self._constant(op.added_norm.weight)
                arguments.add_eps = op.added_norm.eps
        for target, segment in zip(arguments.segments, op.segments, strict=False):
            target.weight = self._packed(segment.weight)
            target.bias = self._constant(segment.bias)
            is_written = target is arguments.segments[0] or op.activation is None
            target.ldy = segment.weight.shape[0]
            if is_written or segment is op.segments[0]:
                target.y = self._at(segment.out)
        arguments.num_segments = len(op.segments)
        arguments.epilogue = _EPILOGUES[op.activation]
        if op.residual is not None:
            arguments.epilogue = abi.OCT_EPI_RESIDUAL
            arguments.scale = op.scale or 0.0
            arguments.residual = self._at(op.residual)
        return arguments

    def _head(self, op: fused_ops.FusedHead) -> abi.LinearArgs:
        arguments = self._input(op.source, op.norm, op.remainder_above)
        arguments.segments[0].weight = self._packed(op.weight)
        arguments.num_segments = 1
        arguments.epilogue = abi.OCT_EPI_HEAD
        arguments.scale = op.scale or 0.0
        head = abi.Head(softcap=op.softcap or 0.0)
        self._kept.append(head)
        arguments.head = ctypes.pointer(head)
        return arguments

    def _input(
        self, source: Value, norm: FusedNorm | None, remainder_above: float
    ) -> abi.LinearArgs:
        arguments = abi.LinearArgs(
            k=source.width, ldin=source.width, remainder_above=remainder_above
        )
        setattr(arguments, "in", self._at(source))  # "in" is a keyword in Python
        if norm is not None:
            arguments.norm, arguments.eps = self._constant(norm.weight), norm.eps
        return arguments

    def _attention(self, op: fused_ops.FusedAttention) -> abi.AttentionArgs:
        kv, q, k, v = self.kv, op.q, op.k, op.v
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= kv.head_dim
        arguments = abi.AttentionArgs(
            num_heads=q.shape[0],
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            head_size=q.shape[-1],
            kv_format=kv.format,
            window=op.window or 0,
            scale=op.scale,
            softcap=op.softcap or 0.0,
            sinks=self._constant(op.sinks),
            q=self._at(q),
            k=self._at(k),
            v=self._at(v),
            ldq=q.width,
            ldk=k.width,
            ldv=v.width,
            kv=kv.layers[op.layer],
            kv_block_bytes=kv.block_bytes,
            out=self._at(op.out),
            num_blocks=kv.num_blocks,
            group=kv.groups[op.layer],
        )
        for name, norm in (("q_norm", op.q_norm), ("k_norm", op.k_norm)):
            if norm is not None:
                setattr(arguments, name, self._constant(norm.weight))
                arguments.qk_norm_eps = norm.eps
        if op.rope is not None:
            arguments.rotary_dim = op.rope.rotary_dim
            arguments.rope_interleaved = op.interleaved
            self._tables.append((arguments, op.rope))
        return arguments

    def _latent(self, op: fused_ops.FusedLatentAttention) -> abi.LatentArgs:
        kv, (num_heads, query_dim) = self.kv, op.q.shape
        rope_dim, rank = op.rope.rotary_dim, op.norm.weight.shape[0]
        nope_dim = query_dim - rope_dim
        up = self._latent_weights.of(op)
        arguments = abi.LatentArgs(
            num_heads=num_heads,
            rank=rank,
            rope_dim=rope_dim,
            nope_dim=nope_dim,
            value_dim=op.out.width // num_heads,
            kv_format=kv.format,
            rope_interleaved=op.interleaved,
            weight_format=up.format,
            scale=op.scale,
            eps=op.norm.eps,
            norm=self._constant(op.norm.weight),
            key_up=up.keys.ctypes.data,
            value_up=up.values.ctypes.data,
            q=self._at(op.q),
            ckv=self._at(op.ckv),
            ldq=op.q.width,
            ldckv=op.ckv.width,
            kv=kv.layers[op.layer],
            kv_block_bytes=kv.block_bytes,
            out=self._at(op.out),
            num_blocks=kv.num_blocks,
            group=kv.groups[op.layer],
        )
        self._tables.append((arguments, op.rope))
        return arguments

    def _experts(self, op: fused_ops.FusedExperts) -> abi.ExpertsArgs:
        experts = (abi.Expert * len(op.experts))(*map(self._expert, op.experts))
        loads = np.zeros(len(experts), dtype=np.int64)
        self._kept += [experts, loads]
        self.expert_loads.append(loads)
        arguments = abi.ExpertsArgs(
            hidden=op.source.width,
            inner=op.experts[0].gate.shape[0],
            epilogue=_EPILOGUES[op.activation],
            remainder_above=op.remainder_above,
            inner_remainder_above=op.inner_remainder_above,
            routing=self._routing(op.routing, op.correction),
            experts=experts,
            logits=self._at(op.logits),
            residual=None if op.residual is None else self._at(op.residual),
            out=self._at(op.out),
            loads=loads.ctypes.data,
        )
        setattr(arguments, "in", self._at(op.source))
        if op.norm is not None:
            arguments.norm, arguments.eps = self._constant(op.norm.weight), op.norm.eps
        self.library.check(self.library.lib.oct_check_experts(ctypes.byref(arguments)))
        return arguments

    def _expert(self, expert: ExpertWeights) -> abi.Expert:
        biases = expert.gate_bias, expert.up_bias, expert.down_bias
        return abi.Expert(*map(self._packed, expert.matrices), *map(self._constant, biases))

    def _routing(self, routing: Routing, correction: np.ndarray | None) -> abi.Routing:
        return abi.Routing(
            num_experts=routing.num_experts,
            top_k=routing.top_k,
            scoring=_SCORING[routing.scoring],
            normalize=routing.normalize,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            group_top=routing.group_top,
            scale=routing.scale,
            correction=self._constant(correction),
        )

    def _rows(self, op: fused_ops.FusedRows) -> abi.RowsArgs:
        width = op.a.shape[-1]
        if op.kind == "sigmoid":
            assert op.b is not None
            width = op.a.width // op.b.width  # values that share a number
        arguments = abi.RowsArgs(
            kind=_ROWS[op.kind],
            width=width,
            per_token=op.a.width // width,
            a=self._at(op.a),
            out=self._at(op.out),
            bias=self._constant(op.bias),
            factor=op.factor,
        )
        if op.norm is not None:
            arguments.b, arguments.eps = self._constant(op.norm.weight), op.norm.eps
        elif op.b is not None:
            arguments.b = self._at(op.b)
        return arguments

    def _at(self, value: Value) -> int:
        return self._buffers.address(value)

    def _constant(self, values: np.ndarray | None) -> int | None:
        """Address of a small array, in float32, that is kept as long as the program."""
        if values is None:
            return None
        values = np.ascontiguousarray(values, dtype=np.float32)
        self._kept.append(values)
        return values.ctypes.data


class _Arena:
    """Memory for the activations of ``max_tokens`` tokens, shared by values in turn.

    It is zero-initialized lazily, and resident only as far as steps have used it.
    """

    def __init__(self, ops: Sequence[FusedOp], max_tokens: int, kept: Collection[Value]):
        self._max_tokens = max_tokens
        offsets: list[int] = []
        free: dict[int, list[int]] = defaultdict(list)  # places by the width they were made for
        widths: list[int] = []
        size = 0

        def allocate(value: Value) -> int:
            nonlocal size
            if free[value.width]:
                return free[value.width].pop()
            offsets.append(size)
            widths.append(value.width)
            # Padded by a cache line, so that rows of different buffers do not share cache sets.
            size += -(-max_tokens * value.width * 4 // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
            return len(offsets) - 1

        self._places = fused_ops.place(ops, allocate, lambda p: free[widths[p]].append(p), kept)
        self._offsets = offsets
        self._memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
        self._base = -(-self._memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT

    def address(self, value: Value) -> int:
        return self._base + self._offsets[self._places[value.source]]

    def array(self, value: Value) -> np.ndarray:
        start = self.address(value) - self._memory.ctypes.data
        count = self._max_tokens * value.width * 4
        piece = self._memory[start : start + count].view(np.float32)
        return piece.reshape(self._max_tokens, value.width)
