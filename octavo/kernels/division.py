"""Division of the fused ops of a step among the ranks of a tensor-parallel group.

Every rank has the same list of ops, and computes its part of the outputs of each::

    linear      some outputs of each matrix; q, k and v those of the rank's heads
    attention   the rank's heads
    recurrence  the rank's heads, with the channels of the convolution that they read; the norm
                behind it, if its groups lie within ranks
    experts     some inner values of every expert, and some outputs; or whole experts, and the sums
                of some outputs
    head        the logits of some tokens
    others      everything: norms, sums, embeddings

A value that a rank makes in part and reads as a whole is *shared*: it lies in memory that all ranks
have, each writes its columns, and they meet behind the op. Any other value lies in memory of the
rank's own. So a decoder layer takes four meetings: behind attention, its output projection, the
gated product, and the projection down. Ranks that have whole experts meet behind these in place
of the gated product: each sums what the experts of all of them have made of a token.

Where attention is divided by sequences, and not by heads, each rank computes the products before
it, all its heads and the product behind it for the rows of its own sequences alone, with the whole
matrices, and only the last of these results is shared: three meetings, and no KV of which two ranks
have a copy.

No number is computed otherwise than by one rank, so that the results are the same to the bit, for
every format of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from octavo.kernels.cpu.layout import TILE
from octavo.kernels.expert_places import ExpertPlaces, LayerPlaces
from octavo.kernels.fused_ops import (
    CannotFuse,
    FusedAttention,
    FusedExperts,
    FusedHead,
    FusedLatentAttention,
    FusedLinear,
    FusedOp,
    FusedRecurrence,
    WeightRef,
    matrices_of,
    reads,
    writes,
)
from octavo.kernels.parts import WHOLE, Part
from octavo.kernels.recorder import Value
from octavo.kernels.recurrence_specs import (
    ConvSpec,
    DeltaSpec,
    GatedNormSpec,
    ScanningSpec,
    ScanSpec,
    channels_of,
)


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Query heads of a rank with their KV heads, each of which has as many of them; numbers are
    those of the whole model."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int


def head_slices(heads: range, group: int) -> Iterator[HeadSlice]:
    """Cut a range of query heads, ``group`` to a KV head, into such slices: whole KV heads
    together, and those that other ranks read too by themselves."""
    head = heads.start
    while head < heads.stop:
        kv_head, place = divmod(head, group)
        whole = (heads.stop - head) // group
        if place == 0 and whole > 0:
            slice = HeadSlice(head, whole * group, kv_head, whole)
        else:
            slice = HeadSlice(head, min(heads.stop, (kv_head + 1) * group) - head, kv_head, 1)
        yield slice
        head += slice.num_heads


class Division:
    """The division of a step's ops for one part; for ``WHOLE``, there is nothing to divide.

    Raises:
        CannotFuse: there are more ranks than heads, or experts lie where the ops have none.
    """

    def __init__(self, ops: Sequence[FusedOp], part: Part = WHOLE):
        self.part = part
        self._shared: set[Value] = set()
        self._heads: dict[Value, range] = {}  # columns of values that only the rank's heads read
        # Those of outputs of recurrent layers that the rank makes, where these are not all.
        self._made: dict[Value, list[range]] = {}
        self._own: set[Value] = set()  # of these, what no other rank reads
        # By their ids, the ops that each rank runs for its own sequences; and the last of a layer.
        self._own_rows: set[int] = set()
        self._closing: set[int] = set()
        self._places: dict[int, LayerPlaces] = {}  # of whole experts, by the id of their op
        if part.is_whole:
            return
        readers: dict[Value, list[FusedOp]] = {}
        for op in ops:
            for value in reads(op):
                readers.setdefault(value, []).append(op)
        if part.experts is not None:
            self._place_experts(part.experts, ops)
        if part.by_sequences:
            self._divide_by_sequences(ops, readers)
        for op in ops:
            self._divide_heads(op, readers)
            if isinstance(op, FusedRecurrence):
                self._divide_recurrence(op, readers)
        for op in ops:
            self._shared.update(self._outputs(op))

    def rows(self, op: FusedLinear, index: int) -> range:
        """Return the outputs of a segment that the rank computes."""
        segment = op.segments[index]
        num_rows = segment.weight.shape[0]
        if self.has_own_rows(op):
            return range(num_rows)
        if (columns := self._heads.get(segment.out.source)) is not None:
            # Outwards to whole tiles: what lies beyond the heads is not read.
            first = columns.start // TILE * TILE
            return range(first, min(num_rows, -(-columns.stop // TILE) * TILE))
        return self.of_rows(num_rows)

    def of_rows(self, num_rows: int) -> range:
        """Return a rank's outputs of a matrix: all of them if they are not divided."""
        return self.part.of_rows(num_rows) if self.part.divides(num_rows) else range(num_rows)

    def columns(self, op: FusedRecurrence) -> list[range]:
        """Return the columns of its output that the rank computes: all of them if it is not
        divided."""
        return self._made.get(op.out.source, [range(op.out.width)])

    def expert_rows(self, op: FusedExperts) -> tuple[range, range]:
        """Return the outputs that the rank computes of an expert that it has: of the matrices
        between input and inner values, and of the last one."""
        inner, outputs = _inner(op), op.out.width
        if id(op) in self._places:
            return range(inner), range(outputs)
        return self.of_rows(inner), self.of_rows(outputs)

    def places(self, op: FusedExperts) -> LayerPlaces | None:
        """Return which ranks have each expert; None where each has its rows of all."""
        return self._places.get(id(op))

    def has_expert(self, op: FusedExperts, index: int) -> bool:
        places = self.places(op)
        return places is None or self.part.rank in places[index]

    def exchanged_width(self, op: FusedExperts) -> int:
        """Return how many values of each row of an expert ranks exchange inside of an op, where
        they meet once more: outputs of whole experts, or inner values of which each makes some; 0
        if it makes them all."""
        if id(op) in self._places:
            return op.out.width
        return inner if self.part.divides(inner := _inner(op)) else 0

    def has_own_rows(self, op: FusedOp) -> bool:
        """Whether each rank runs an op for the tokens of its own sequences, and not for all."""
        return id(op) in self._own_rows

    def is_shared(self, value: Value) -> bool:
        """Whether ranks make parts of a value that each of them reads as a whole."""
        return value.source in self._shared

    def meets(self, op: FusedOp) -> bool:
        """Whether all ranks have to meet behind an op before the next one. One rank always does."""
        return self.part.is_whole or any(True for _ in self._outputs(op))

    def matrices(self, ops: Sequence[FusedOp]) -> Iterator[tuple[WeightRef, range]]:
        """Yield every matrix of the ops, with the rows that the rank reads, with repetitions."""
        for op in ops:
            match op:
                case FusedLinear():
                    for index, segment in enumerate(op.segments):
                        yield segment.weight, self.rows(op, index)
                case FusedHead():
                    yield op.weight, self.of_rows(op.weight.shape[0])
                case FusedExperts():
                    between, outputs = self.expert_rows(op)
                    for index, expert in enumerate(op.experts):
                        is_here = self.has_expert(op, index)
                        for matrix, rows in zip(
                            expert.matrices, (between, between, outputs), strict=True
                        ):
                            yield matrix, rows if is_here else range(0)
                case _:
                    yield from ((matrix, range(matrix.shape[0])) for matrix in matrices_of(op))

    def exchanged(self, ops: Sequence[FusedOp]) -> tuple[int, int]:
        """Return the numbers (float32) that all ranks together write to shared memory for each
        token of a step, and for each row of the head whose logits are needed."""
        per_token = sum(value.width for op in ops for value in self._outputs(op))
        for op in ops:
            if isinstance(op, FusedExperts):
                per_token += op.routing.top_k * self.exchanged_width(op)
        head = ops[-1]
        assert isinstance(head, FusedHead)
        vocab_size = head.weight.shape[0]
        return per_token, vocab_size if self.part.divides(vocab_size) else 0

    def _place_experts(self, experts: ExpertPlaces, ops: Sequence[FusedOp]) -> None:
        mixtures = [op for op in ops if isinstance(op, FusedExperts)]
        sizes = [op.routing.num_experts for op in mixtures]
        if [len(layer) for layer in experts.layers[: len(mixtures)]] != sizes:
            raise CannotFuse(
                f"experts are placed in layers of {[len(layer) for layer in experts.layers]}, and "
                f"the model has layers of {sizes}"
            )
        self._places = {id(op): layer for op, layer in zip(mixtures, experts.layers, strict=False)}

    def _divide_by_sequences(
        self, ops: Sequence[FusedOp], readers: dict[Value, list[FusedOp]]
    ) -> None:
        """Note the ops of attention. Before it these are the products that it alone needs: the
        residual stream, which others read too, is made by all."""
        made_by = {value: op for op in ops for value in writes(op)}
        for op in ops:
            if isinstance(op, FusedAttention | FusedRecurrence):
                raise CannotFuse("only attention over latent vectors is divided by sequences")
            if not isinstance(op, FusedLatentAttention):
                continue
            own: list[FusedOp] = [op]
            for each in own:  # which grows meanwhile
                for before in map(made_by.get, reads(each)):
                    if isinstance(before, FusedLinear) and not _is_in(before, own):
                        read_by = (reader for out in writes(before) for reader in readers[out])
                        if all(_is_in(reader, own) for reader in read_by):
                            own.append(before)
            (closing,) = readers[op.out.source]
            if not isinstance(closing, FusedLinear) or closing.added is not None:
                raise CannotFuse(
                    "behind attention that is divided by sequences there is no product"
                )
            self._own_rows.update(map(id, (*own, closing)))
            self._closing.add(id(closing))

    def _divide_heads(self, op: FusedOp, readers: dict[Value, list[FusedOp]]) -> None:
        """Note the columns of q, k and v that the rank's heads read, where nothing else reads
        these."""
        match op:
            case FusedAttention():
                num_heads, num_kv_heads = op.q.shape[0], op.k.shape[0]
                self._check_heads(num_heads)
                kv_heads = self.part.of_kv_heads(num_heads, num_kv_heads)
                read = {op.q: self.part.of_heads(num_heads), op.k: kv_heads, op.v: kv_heads}
            case FusedLatentAttention() if not self.part.by_sequences:
                self._check_heads(op.q.shape[0])
                read = {op.q: self.part.of_heads(op.q.shape[0])}
            case _:
                return
        for value, heads in read.items():
            if len(readers[value.source]) == 1:
                size = value.width // value.shape[0]
                self._heads[value.source] = range(heads.start * size, heads.stop * size)

    def _divide_recurrence(self, op: FusedRecurrence, readers: dict[Value, list[FusedOp]]) -> None:
        """Note the columns that the rank makes, and which of them it alone reads."""
        out, spec = op.out.source, op.spec
        behind = [each for each in readers.get(out, []) if isinstance(each, FusedRecurrence)]
        is_read_by_one = len(readers.get(out, [])) == 1
        match spec:
            case ConvSpec():
                scan = _scan_of(behind) if is_read_by_one else None
                if scan is not None or self.part.divides(spec.channels):
                    self._made[out] = channels_of(spec, scan, self.part)
                if scan is not None:
                    self._own.add(out)
            case ScanSpec() | DeltaSpec():
                self._check_heads(spec.heads, "a recurrence")
                self._made[out] = [_columns(spec, self.part)]
                if is_read_by_one and any(_is_divisible(each, spec, self.part) for each in behind):
                    self._made[behind[0].out.source] = self._made[out]
                    self._own.add(out)
            case GatedNormSpec():
                pass  # with the scan before it

    def _check_heads(self, num_heads: int, layer: str = "attention") -> None:
        if num_heads < self.part.size:
            raise CannotFuse(
                f"{layer} of {num_heads} heads cannot be divided among {self.part.size} ranks: "
                f"{num_heads} are the most"
            )

    def _outputs(self, op: FusedOp) -> Iterator[Value]:
        """Yield the outputs of an op that ranks make in part and read as a whole."""
        if self.part.is_whole:
            return
        if self.has_own_rows(op):
            yield from writes(op) if id(op) in self._closing else ()
            return
        match op:
            case FusedLinear():
                for segment in op.segments[:1] if op.activation else op.segments:
                    is_divided = self.part.divides(segment.weight.shape[0])
                    if is_divided and segment.out.source not in self._heads:
                        yield segment.out.source
            case FusedAttention() | FusedLatentAttention():
                yield op.out.source
            case FusedExperts() if self.part.divides(op.out.width):
                yield op.out.source
            case FusedRecurrence() if (out := op.out.source) in self._made and out not in self._own:
                yield out


def _is_in(op: FusedOp, ops: Iterable[FusedOp]) -> bool:
    """Whether this very op is among others; equal ones may be of other layers."""
    return any(op is other for other in ops)


def _scan_of(ops: Sequence[FusedRecurrence]) -> ScanningSpec | None:
    """Return what scans the output of a convolution."""
    return next((op.spec for op in ops if isinstance(op.spec, ScanSpec | DeltaSpec)), None)


def _columns(scan: ScanningSpec, part: Part) -> range:
    heads = part.of_heads(scan.heads)
    return range(heads.start * scan.head_dim, heads.stop * scan.head_dim)


def _is_divisible(op: FusedRecurrence, scan: ScanningSpec, part: Part) -> bool:
    """Whether a norm can be computed by the heads before it, in every rank: no group is of two."""
    norm = op.spec
    if not isinstance(norm, GatedNormSpec):
        return False
    if not norm.normed:
        return True
    return all(_columns(scan, each).start % norm.group == 0 for each in part.of_all_ranks())


def _inner(op: FusedExperts) -> int:
    return op.experts[0].gate.shape[0]
