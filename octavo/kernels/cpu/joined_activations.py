"""Takes activations without a product into the linear before them, which native kernels can do.

up > gelu > down        two Linears; else a pass over all inner values lies between them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from octavo.kernels.fused_ops import ALONE, FusedLinear, FusedOp, FusedRows, reads
from octavo.kernels.recorder import Value

_KINDS = frozenset(ALONE.values())


def join_activations(ops: Sequence[FusedOp]) -> list[FusedOp]:
    """Return ``ops`` with every activation that alone reads a linear's only output taken into that
    linear."""
    return list(_joined(ops, Counter(value for op in ops for value in reads(op))))


def _joined(ops: Sequence[FusedOp], num_readers: Counter[Value]) -> Iterator[FusedOp]:
    before: FusedOp | None = None
    for op in ops:
        if (
            isinstance(op, FusedRows)
            and op.kind in _KINDS
            and isinstance(before, FusedLinear)
            and len(before.segments) == 1
            and before.activation is before.residual is None
            and before.segments[0].out.source is op.a.source
            and num_readers[op.a.source] == 1
        ):
            before.activation, before.segments[0].out = op.kind, op.out
            continue
        yield op
        before = op
