"""Runs a draft head as one native call, recorded and fused as a model's step is.

    program = HeadProgram(module, target, max_rows)
    program.input("hidden")[:2] = ...       hidden states of the rows to run
    program.run(2, ...)                     the most likely tokens of rows, with log-probabilities
    program.hidden[:2]                      the head's own hidden states, for its next call

Float matrices that are not shared with the target are packed with 8 bits: a head is bound by
memory bandwidth, and the rounding can change drafts but no answers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from octavo.base.errors import EngineError
from octavo.kernels import fused_ops
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.activation_precision import ACTIVATIONS, DEFAULT, round_activations
from octavo.kernels.cpu.library import Library, Pool
from octavo.kernels.cpu.packing import PackedWeight, pack, pack_integers, plain_format
from octavo.kernels.cpu.program import KVLayout, Program
from octavo.kernels.fused_ops import WeightRef
from octavo.kernels.fuser import fuse
from octavo.kernels.recorder import Tape, Value
from octavo.layers.linear import Linear
from octavo.layers.module import Module
from octavo.quantization.base import Weight
from octavo.runtime.native_sampling import LogprobArray
from octavo.runtime.op_program import RecordingContext
from octavo.speculation.native_target import NativeTarget, SharedMatrix

_log = logging.getLogger("octavo")

NO_KV = KVLayout(abi.OCT_KV_F32, 1, 16, 0, 0, [], [])
_GROUP = 32  # inputs that share a scale


class DraftHead(Module):
    """A draft head: a module that computes logits from hidden states and token ids.

    Its ``forward`` takes the hidden states by name, the token ids, and a ``ForwardContext``.
    """

    inputs: Mapping[str, int]  # the widths of its hidden states, by name


class TokenCandidate(NamedTuple):
    """A row of a head's vocabulary, with the log-probability that the head gives it."""

    row: int
    logprob: float


@dataclass(frozen=True, slots=True)
class HeadSequences:
    """The sequences that the rows of a head with attention belong to, one after the other.

    Args:
        counts: rows of each sequence.
        ends: the position after the last row of each.
        tables: the block table of each.
    """

    counts: list[int]
    ends: list[int]
    tables: list[list[int]]


class HeadProgram:
    """Runs one head, for up to ``max_rows`` rows at once."""

    def __init__(
        self,
        head: DraftHead,
        target: NativeTarget,
        max_rows: int,
        kv: KVLayout = NO_KV,
        block_size: int = 16,
    ):
        ops, inputs = _record(head)
        packed = _PackedMatrices(target.library, target.pool)
        self._program = Program(ops, target.library, target.pool, kv, packed.struct, max_rows)
        self._target = target  # keeps the shared matrices alive
        self._packed = packed
        self._inputs = inputs
        self._block_size = block_size
        last = ops[-1]
        assert isinstance(last, fused_ops.FusedHead), last
        self._hidden = last.source
        self._samples = _greedy(max_rows)
        self._logprobs = LogprobArray(max_rows, self._program.vocab_size)
        self._logits = np.zeros(max_rows, dtype=np.uint64)  # NULL: logits are not copied out

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that are not shared with the target."""
        return self._packed.num_bytes

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def max_rows(self) -> int:
        return self._program.max_tokens

    def input(self, name: str) -> np.ndarray:
        """The input buffer of a hidden state, float32 [max_rows, width], to be written before a
        run."""
        return self._program.buffer(self._inputs[name])

    @property
    def hidden(self) -> np.ndarray:
        """The hidden states that the head's last norm has read, float32 [max_rows, width]."""
        return self._program.buffer(self._hidden)

    def run(
        self,
        num_rows: int,
        rows: Sequence[int] | np.ndarray,
        num_top: int = 1,
        token_ids: Sequence[int] | np.ndarray | None = None,
        runs: HeadSequences | None = None,
    ) -> list[list[TokenCandidate]]:
        """Run ``num_rows`` rows, and return the ``num_top`` likeliest tokens of some, best first.

        A row with values that are not finite has none, nor has any if the call fails, which is
        logged and not raised: without a draft the request goes on.

        Args:
            rows: those whose tokens are returned.
            token_ids: of all rows, for a head that embeds them.
            runs: of all rows, for a head with attention.
        """
        count = len(rows)
        ids = np.zeros(num_rows, np.int32) if token_ids is None else np.array(token_ids, np.int32)
        out, tokens, status = (
            np.array(rows, np.int32),
            np.zeros(count, np.int32),
            np.zeros(count, np.int32),
        )
        finite = np.zeros(num_rows, np.uint8)
        sequences, longest, kept = self._sequences(num_rows, runs)
        batch = abi.Batch(
            seqs=sequences,
            token_ids=ids.ctypes.data,
            num_multi_steps=1,
            num_out=count,
            out_rows=out.ctypes.data,
            logits=self._logits.ctypes.data,
            samples=self._samples,
            logprobs=self._logprobs.ask([min(num_top, self.vocab_size)] * count),
            tokens=tokens.ctypes.data,
            status=status.ctypes.data,
            row_finite=finite.ctypes.data,
        )
        try:
            self._program.step(batch, longest)
        except EngineError as error:
            _log.error("a head was not run: %s", error)
            return [[] for _ in range(count)]
        del kept  # the native call has read these arrays
        return [
            self._candidates(index) if status[index] == abi.OCT_TOKEN_OK and finite[row] else []
            for index, row in enumerate(rows)
        ]

    def _candidates(self, index: int) -> list[TokenCandidate]:
        return [TokenCandidate(*pair) for pair in self._logprobs.entry(index, 0).top]

    def _sequences(
        self, num_rows: int, runs: HeadSequences | None
    ) -> tuple[abi.Sequences, int, Iterable[np.ndarray]]:
        """The native sequences, the longest length, and the arrays that they point to."""
        if runs is None:
            return abi.Sequences(num_tokens=num_rows), 0, ()
        starts = np.cumsum([0, *runs.counts], dtype=np.int32)
        lengths = np.array(runs.ends, dtype=np.int32)
        tables = np.zeros((len(runs.tables), max(map(len, runs.tables))), dtype=np.int32)
        for row, table in zip(tables, runs.tables, strict=True):
            row[: len(table)] = table
        sequences = abi.Sequences(
            num_seqs=len(runs.counts),
            num_tokens=num_rows,
            q_start=starts.ctypes.data,
            kv_len=lengths.ctypes.data,
            block_table=tables.ctypes.data,
            table_stride=tables.shape[1],
            block_size=self._block_size,
        )
        return sequences, int(lengths.max()), (starts, lengths, tables)


class Projection:
    """A single linear layer, run outside of a head program."""

    def __init__(self, linear: Linear, library: Library, pool: Pool):
        self._library, self._pool = library, pool
        self._weight = pack_head(linear.weight.value, library, pool)

    def run(self, x: np.ndarray) -> np.ndarray:
        """Multiply contiguous rows, float32 [rows, in_features] -> [rows, out_features]."""
        assert x.dtype == np.float32 and x.flags.c_contiguous
        out = np.empty((len(x), self._weight.shape[0]), dtype=np.float32)
        arguments = abi.LinearArgs(
            rows=len(x),
            k=x.shape[1],
            ldin=x.shape[1],
            remainder_above=ACTIVATIONS[DEFAULT].other,
            epilogue=abi.OCT_EPI_NONE,
            num_segments=1,
        )
        setattr(arguments, "in", x.ctypes.data)
        segment = arguments.segments[0]
        segment.weight = self._weight.as_struct()
        segment.y, segment.ldy = out.ctypes.data, out.shape[1]
        self._library.check(self._library.lib.oct_linear(self._pool, ctypes.byref(arguments)))
        return out


def _record(head: DraftHead) -> tuple[list[fused_ops.FusedOp], dict[str, Value]]:
    tape = Tape()
    token_ids = Value(tape, None, ())
    inputs = {name: tape.input(width) for name, width in head.inputs.items()}
    head(inputs, token_ids, RecordingContext(token_ids))
    ops = fuse(tape)
    round_activations(ops, "auto")
    return ops, inputs


class _PackedMatrices:
    """The packed matrices of a head, each packed at its first use."""

    def __init__(self, library: Library, pool: Pool):
        self._library, self._pool = library, pool
        self._made: dict[int, tuple[WeightRef, PackedWeight]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(packed.nbytes for _, packed in self._made.values())

    def struct(self, matrix: WeightRef) -> abi.Weight:
        if isinstance(matrix, SharedMatrix):
            return matrix.struct
        if id(matrix) not in self._made:
            self._made[id(matrix)] = (
                matrix,
                pack_head(cast(Weight, matrix), self._library, self._pool),
            )
        return self._made[id(matrix)][1].as_struct()


def pack_head(weight: Weight, library: Library, pool: Pool) -> PackedWeight:
    """Pack a matrix of floats with 8 bits and a scale for each 32 inputs.

    A matrix that is quantized, has other widths or values that are not finite keeps its format.
    """
    if weight.is_quantized:
        return pack(weight, library, pool)
    n, k = weight.shape
    values = weight.floats()
    if k % _GROUP or not np.isfinite(values).all():
        return pack(weight, library, pool)
    groups = values.reshape(n, k // _GROUP, _GROUP)
    scales = np.abs(groups).max(axis=2) / 127
    scales = np.maximum(scales, 2.0**-24).astype(np.float16)  # the least positive float16
    codes = np.rint(groups / scales.astype(np.float32)[:, :, None]).clip(-127, 127)
    spec = plain_format(abi.OCT_W8S, n, k, _GROUP, library)
    q = (codes + 128).astype(np.uint8).reshape(n, k)
    return pack_integers(spec, q, scales, None, library, pool)


def _greedy(count: int) -> ctypes.Array[abi.Sample]:
    samples = (abi.Sample * count)()
    for sample in samples:
        sample.repetition_penalty = sample.top_p = sample.typical_p = 1.0
    return samples
