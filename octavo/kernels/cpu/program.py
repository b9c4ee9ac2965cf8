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
from typing import TYPE_CHECKING

import numpy as np

from octavo.kernels import fused_ops
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.latent_weights import LatentWeights
from octavo.kernels.cpu.layout import TILE, experts_bytes
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.recurrence import StateLayout, recurrence_structs
from octavo.kernels.division import Division, HeadSlice, head_slices
from octavo.kernels.expert_counts import ExpertCounts
from octavo.kernels.expert_places import LayerPlaces
from octavo.kernels.fused_ops import FusedNorm, FusedOp, WeightRef
from octavo.kernels.parts import WHOLE, Part
from octavo.kernels.recorder import RopeTable, Value
from octavo.kernels.routing import CLAMPED_SWIGLU, ExpertWeights, Routing

if TYPE_CHECKING:
    from octavo.kernels.cpu.group import ShmGroup

_EPILOGUES = {
    None: abi.OCT_EPI_NONE,
    "silu": abi.OCT_EPI_SILU_MUL,
    "gelu_tanh": abi.OCT_EPI_GELU_TANH_MUL,
    "gelu_erf": abi.OCT_EPI_GELU_ERF_MUL,
    CLAMPED_SWIGLU: abi.OCT_EPI_CLAMPED_SWIGLU,
    "silu_alone": abi.OCT_EPI_SILU,
    "gelu_tanh_alone": abi.OCT_EPI_GELU_TANH,
    "gelu_erf_alone": abi.OCT_EPI_GELU_ERF,
    "relu_alone": abi.OCT_EPI_RELU,
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
    head_bytes: int = 0  # from one KV head of a block to the next
    states: StateLayout | None = None  # of recurrent layers


@dataclass(frozen=True, slots=True, eq=False)
class LoraSite:
    """A linear, a head or an embedding that adapters may change.

    ``kind``: OCT_OP_*. Of each of its matrices its name ("" if adapters cannot change it), its
    numbers of outputs and inputs, and which of the outputs the rank computes, from a tile on.
    """

    kind: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    rows: tuple[range, ...]


class Program:
    """A model's step, for the kernels of one library.

    ``packed(weight)`` returns the struct of a weight that was packed before; it must stay valid as
    long as the program. ``kept`` are values that :meth:`buffer` can return after a step, in
    addition to those of the head and of inputs. Without a head, ``vocab_size`` is 0 and nothing is
    sampled: so it is in all stages of a pipeline but the last. Of a ``group``, it computes
    ``part``, which is that of the group's rank. ``name_of`` is what adapters call a weight.
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
        group: ShmGroup | None = None,
        part: Part = WHOLE,
        name_of: Callable[[WeightRef], str] = lambda weight: "",
    ):
        self.library, self.pool, self.group = library, pool, group
        self._division = Division(ops, part)
        self.ops, self.num_ops = ops, len(ops)
        self.max_tokens = max_tokens
        head = ops[-1]
        self.vocab_size = head.weight.shape[0] if isinstance(head, fused_ops.FusedHead) else 0
        self._packed, self._name_of = packed, name_of
        self._latent_weights = latent_weights or LatentWeights(
            packed, library, pool, self._division.part
        )
        self.kv = kv
        self._kept: list[object] = []  # what the structs point to
        self._tables: list[tuple[abi.AttentionArgs | abi.LatentArgs, RopeTable]] = []
        self._cos_sin: list[np.ndarray] = []  # of each of these, as long as steps read it
        self._num_positions = 0
        self.seconds = 0.0  # spent in steps so far
        mixtures = [op for op in ops if isinstance(op, fused_ops.FusedExperts)]
        self._mixtures = {id(op): layer for layer, op in enumerate(mixtures)}
        self.expert_counts = ExpertCounts(
            len(mixtures),
            mixtures[0].routing.num_experts if mixtures else 0,  # all layers have as many
            part.size if part.experts is not None else 0,
        )
        # Memory of the group for rows of experts, by its size: of one op after the other.
        self._expert_rows: dict[int, np.ndarray] = {}
        self._buffers = _Arena(ops, max_tokens, kept, self._division, group)
        # What adapters may change, as they are numbered for kernels.
        self.lora_sites: list[LoraSite] = []
        self._router_logits = {op.logits.source for op in mixtures}
        made = [node for op in ops for node in self._nodes(op)]
        self._nodes_array = (abi.Node * len(made))(*made)
        self._struct = abi.Program(
            *(self._nodes_array, len(made), int(self.vocab_size > 0)),
            *(self.vocab_size, max_tokens, *self._shared_head()),
        )

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
            group=self.group,
            part=self._division.part,
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
        for node in self._nodes_array:
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
                        if weight.data:  # else another rank has it
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

    def _shared_head(self) -> tuple[int | None, abi.SharedHead]:
        """Return the group, and memory for what its ranks share besides activations."""
        group = self.group
        if group is None or not self.vocab_size:
            return None if group is None else group.handle, abi.SharedHead()
        rows, padded = self.max_tokens, -(-self.vocab_size // TILE) * TILE
        counts = rows * padded, rows * group.size, rows * group.size, 1 + rows
        arrays = [group.allocate(4 * count) for count in counts]
        self._kept += arrays
        return group.handle, abi.SharedHead(*(array.ctypes.data for array in arrays))

    def _nodes(self, op: FusedOp) -> Iterator[abi.Node]:
        """Yield the nodes of an op; behind the last one the ranks of a group may have to meet."""
        made = list(self._arguments(op))
        self._kept += [arguments for _, arguments in made]
        for index, (code, arguments) in enumerate(made, 1):
            meets = index == len(made) and self._division.meets(op)
            own_rows = self._division.has_own_rows(op)
            site = -1 if own_rows else self._lora_site(op)
            yield abi.Node(code, meets, own_rows, site, ctypes.addressof(arguments))

    def _arguments(self, op: FusedOp) -> Iterator[tuple[int, ctypes.Structure]]:
        match op:
            case fused_ops.FusedEmbedding():
                yield abi.OCT_OP_EMBED, self._embed(op)
            case fused_ops.FusedLinear():
                yield abi.OCT_OP_LINEAR, self._linear(op)
            case fused_ops.FusedAttention():
                heads, group = op.q.shape[0], op.q.shape[0] // op.k.shape[0]
                for each in head_slices(self._division.part.of_heads(heads), group):
                    yield abi.OCT_OP_ATTENTION, self._attention(op, each)
            case fused_ops.FusedRows():
                yield abi.OCT_OP_ROWS, self._rows(op)
            case fused_ops.FusedCheck():
                yield abi.OCT_OP_CHECK, abi.CheckArgs(x=self._at(op.source), width=op.source.width)
            case fused_ops.FusedHead():
                yield abi.OCT_OP_HEAD, self._head(op)
            case fused_ops.FusedLatentAttention():
                yield abi.OCT_OP_LATENT, self._latent(op)
            case fused_ops.FusedExperts():
                yield abi.OCT_OP_EXPERTS, self._experts(op)
            case fused_ops.FusedRecurrence():
                columns = self._division.columns(op)
                yield from recurrence_structs(op, columns, self._at, self._constant, self.kv.states)

    def _lora_site(self, op: FusedOp) -> int:
        """Number what adapters may change of an op; -1 if that is nothing."""
        match op:
            case fused_ops.FusedEmbedding():
                num_tokens, width = op.weight.shape
                site = LoraSite(
                    *(abi.OCT_OP_EMBED, (self._name_of(op.weight),)),
                    *(((width, num_tokens),), (range(width),)),
                )
            case fused_ops.FusedLinear():
                site = LoraSite(
                    abi.OCT_OP_LINEAR,
                    tuple(
                        ""
                        if segment.out.source in self._router_logits
                        else self._name_of(segment.weight)
                        for segment in op.segments
                    ),
                    tuple((each.weight.shape[0], each.weight.shape[1]) for each in op.segments),
                    tuple(self._division.rows(op, index) for index in range(len(op.segments))),
                )
            case fused_ops.FusedHead():
                rows, width = op.weight.shape
                site = LoraSite(
                    *(abi.OCT_OP_HEAD, (self._name_of(op.weight),), ((rows, width),)),
                    (self._division.of_rows(self.vocab_size),),
                )
            case _:
                return -1
        self.lora_sites.append(site)
        return len(self.lora_sites) - 1

    def _embed(self, op: fused_ops.FusedEmbedding) -> abi.EmbedArgs:
        arguments = abi.EmbedArgs(
            table=self._packed(op.weight), scale=op.scale, out=self._at(op.out)
        )
        if op.positions is not None:
            arguments.positions = self._packed(op.positions)
            arguments.position_offset = op.position_offset
        if op.types is not None:
            arguments.num_types, arguments.types = len(op.types), self._constant(op.types)
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
        for index, segment in enumerate(op.segments):
            target, rows = arguments.segments[index], self._division.rows(op, index)
            target.weight = self._some_rows(segment.weight, rows)
            target.bias = self._constant(segment.bias, rows)
            target.ldy = segment.weight.shape[0]
            if index == 0 or op.activation is None:
                target.y = self._at(segment.out, rows.start)
        arguments.num_segments = len(op.segments)
        arguments.epilogue = _EPILOGUES[op.activation]
        if op.residual is not None:
            arguments.epilogue = abi.OCT_EPI_RESIDUAL
            arguments.scale = op.scale or 0.0
            arguments.residual = self._at(op.residual, self._division.rows(op, 0).start)
        return arguments

    def _head(self, op: fused_ops.FusedHead) -> abi.LinearArgs:
        arguments = self._input(op.source, op.norm, op.remainder_above)
        rows = self._division.of_rows(self.vocab_size)
        arguments.segments[0].weight = self._some_rows(op.weight, rows)
        arguments.num_segments = 1
        arguments.epilogue = abi.OCT_EPI_HEAD
        arguments.scale = op.scale or 0.0
        head = abi.Head(softcap=op.softcap or 0.0, first_id=rows.start)
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

    def _attention(self, op: fused_ops.FusedAttention, heads: HeadSlice) -> abi.AttentionArgs:
        kv, q, k, v = self.kv, op.q, op.k, op.v
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= kv.head_dim
        size = q.shape[-1]
        before = self._division.part.of_kv_heads(q.shape[0], k.shape[0]).start
        arguments = abi.AttentionArgs(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=kv.head_dim,
            head_size=size,
            kv_format=kv.format,
            window=op.window or 0,
            scale=op.scale,
            softcap=op.softcap or 0.0,
            sinks=self._constant(
                op.sinks, range(heads.first_head, heads.first_head + heads.num_heads)
            ),
            q=self._at(q, heads.first_head * size),
            k=self._at(k, heads.first_kv_head * size),
            v=self._at(v, heads.first_kv_head * size),
            ldq=q.width,
            ldk=k.width,
            ldv=v.width,
            kv=kv.layers[op.layer] + (heads.first_kv_head - before) * kv.head_bytes,
            kv_block_bytes=kv.block_bytes,
            out=self._at(op.out, heads.first_head * size),
            ldo=op.out.width,
            num_blocks=kv.num_blocks,
            group=kv.groups[op.layer],
            bidirectional=op.bidirectional,
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
        up, heads = self._latent_weights.of(op), self._division.part.of_heads(num_heads)
        value_dim = op.out.width // num_heads
        arguments = abi.LatentArgs(
            num_heads=len(heads),
            rank=rank,
            rope_dim=rope_dim,
            nope_dim=nope_dim,
            value_dim=value_dim,
            kv_format=kv.format,
            rope_interleaved=op.interleaved,
            weight_format=up.format,
            scale=op.scale,
            eps=op.norm.eps,
            norm=self._constant(op.norm.weight),
            key_up=up.keys.ctypes.data,
            value_up=up.values.ctypes.data,
            q=self._at(op.q, heads.start * query_dim),
            ckv=self._at(op.ckv),
            ldq=op.q.width,
            ldckv=op.ckv.width,
            kv=kv.layers[op.layer],
            kv_block_bytes=kv.block_bytes,
            out=self._at(op.out, heads.start * value_dim),
            ldo=op.out.width,
            num_blocks=kv.num_blocks,
            group=kv.groups[op.layer],
        )
        self._tables.append((arguments, op.rope))
        return arguments

    def _experts(self, op: fused_ops.FusedExperts) -> abi.ExpertsArgs:
        hidden, inner = op.out.width, op.experts[0].gate.shape[0]
        division, outputs = self._division, self._division.of_rows(hidden)
        rows = division.expert_rows(op)
        experts = (abi.Expert * len(op.experts))()  # those of other ranks stay zeros
        for index, expert in enumerate(op.experts):
            if division.has_expert(op, index):
                experts[index] = self._expert(expert, *rows)
        self._kept.append(experts)
        arguments = abi.ExpertsArgs(
            hidden=hidden,
            inner=inner,
            first_hidden=outputs.start,
            num_hidden=len(outputs),
            first_inner=rows[0].start,
            epilogue=_EPILOGUES[op.activation],
            remainder_above=op.remainder_above,
            inner_remainder_above=op.inner_remainder_above,
            routing=self._routing(op.routing, op.correction),
            experts=experts,
            logits=self._at(op.logits),
            residual=None if op.residual is None else self._at(op.residual),
            out=self._at(op.out),
            loads=self.expert_counts.loads[self._mixtures[id(op)]].ctypes.data,
        )
        setattr(arguments, "in", self._at(op.source))
        if division.exchanged_width(op):
            exchanged = self._rows_to_exchange(op).ctypes.data
            if (places := division.places(op)) is None:
                arguments.inner_rows = exchanged
            else:
                arguments.output_rows = exchanged
                arguments.places = self._expert_places(op, places)
        if op.norm is not None:
            arguments.norm, arguments.eps = self._constant(op.norm.weight), op.norm.eps
        self.library.check(self.library.lib.oct_check_experts(ctypes.byref(arguments)))
        return arguments

    def _rows_to_exchange(self, op: fused_ops.FusedExperts) -> np.ndarray:
        """Return shared memory for rows of experts, which ops use in turn if all ranks meet behind
        each of them."""
        assert self.group is not None
        hidden, inner = op.out.width, op.experts[0].gate.shape[0]
        num_bytes = experts_bytes(hidden, inner, op.routing.top_k, self.max_tokens)
        if (rows := self._expert_rows.get(num_bytes)) is None:
            rows = self.group.allocate(num_bytes)
            self._kept.append(rows)
            if self._division.meets(op):
                self._expert_rows[num_bytes] = rows
        return rows

    def _expert_places(self, op: fused_ops.FusedExperts, places: LayerPlaces) -> abi.ExpertPlaces:
        counts = [len(ranks) for ranks in places]
        begin = np.cumsum([0, *counts], dtype=np.int32)
        ranks = np.array([rank for each in places for rank in each], dtype=np.int32)
        self._kept += [begin, ranks]
        rows = self.expert_counts.rank_rows[self._mixtures[id(op)]]
        part = self._division.part
        return abi.ExpertPlaces(
            part.rank, part.size, *(array.ctypes.data for array in (begin, ranks, rows))
        )

    def _expert(self, expert: ExpertWeights, between: range, outputs: range) -> abi.Expert:
        rows = between, between, outputs
        biases = expert.gate_bias, expert.up_bias, expert.down_bias
        return abi.Expert(
            *map(self._some_rows, expert.matrices, rows), *map(self._constant, biases, rows)
        )

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

    def _some_rows(self, weight: WeightRef, rows: range) -> abi.Weight:
        """The struct of some rows of a packed matrix, which begin with a tile."""
        struct = self._packed(weight)
        if len(rows) < struct.n:
            tile_bytes = self.library.lib.oct_packed_bytes(
                struct.format, TILE, struct.k, struct.group
            )
            assert rows.start % TILE == 0
            struct.data += rows.start // TILE * self.library.check(tile_bytes)
            struct.n = len(rows)
        return struct

    def _at(self, value: Value, column: int = 0) -> int:
        return self._buffers.address(value) + 4 * column

    def _constant(self, values: np.ndarray | None, rows: range | None = None) -> int | None:
        """Address of a small array, or of some rows of it, in float32, that is kept as long as the
        program."""
        if values is None:
            return None
        values = np.ascontiguousarray(values, dtype=np.float32)
        if rows is not None:
            values = values[rows.start : rows.stop]
        self._kept.append(values)
        return values.ctypes.data


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in memory for values of one width, in the rank's own memory or in shared one."""

    is_shared: bool
    width: int
    offset: int


class _Arena:
    """Memory for the activations of ``max_tokens`` tokens, shared by values in turn.

    It is zero-initialized lazily, and resident only as far as steps have used it. Values that ranks
    share lie in the memory of their group, at the same offsets in each.
    """

    def __init__(
        self,
        ops: Sequence[FusedOp],
        max_tokens: int,
        kept: Collection[Value],
        division: Division,
        group: ShmGroup | None,
    ):
        self._max_tokens = max_tokens
        free: dict[tuple[bool, int], list[_Place]] = defaultdict(list)
        sizes = {False: 0, True: 0}

        def allocate(value: Value) -> _Place:
            kind = division.is_shared(value), value.width
            if free[kind]:
                return free[kind].pop()
            place = _Place(*kind, sizes[kind[0]])
            # Padded by a cache line, so that rows of different buffers do not share cache sets.
            size = -(-max_tokens * value.width * 4 // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
            sizes[place.is_shared] += size
            return place

        def release(place: _Place) -> None:
            free[place.is_shared, place.width].append(place)

        self._places = fused_ops.place(ops, allocate, release, kept, division)
        own = np.zeros(sizes[False] + _ALIGNMENT, dtype=np.uint8)
        begin = -own.ctypes.data % _ALIGNMENT
        self._memory = {False: own[begin : begin + sizes[False]]}
        if group is not None:
            self._memory[True] = group.allocate(sizes[True])
        self._base = {kind: memory.ctypes.data for kind, memory in self._memory.items()}

    def address(self, value: Value) -> int:
        place = self._places[value.source]
        return self._base[place.is_shared] + place.offset

    def array(self, value: Value) -> np.ndarray:
        place = self._places[value.source]
        count = self._max_tokens * value.width * 4
        piece = self._memory[place.is_shared][place.offset : place.offset + count]
        return piece.view(np.float32).reshape(self._max_tokens, value.width)
