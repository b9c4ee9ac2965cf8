"""Precision with which activations are multiplied with quantized weights.

A group of activations becomes one int8 each, with a shared scale; and some groups have a remainder,
a second int8 for what the first leaves: 15 bits, as exact as float16. int8 loses most in groups
with an outlier, whose scale is too large for the other values. So a few groups, those whose largest
magnitude is above a multiple of the row's root mean square, have most of the loss (docs/kernels.md
has the table). A remainder costs nothing where a step waits for memory, and as much as its group
where it computes, as in prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from octavo.kernels.fused_ops import FusedExperts, FusedHead, FusedLinear, FusedOp


class Above(NamedTuple):
    """Multiples of a row's root mean square above which groups have remainders."""

    normed: float  # for rows that come out of a norm
    other: float  # for other rows: products of a gate are uneven, and outliers matter less


ACTIVATIONS = {
    "int8": Above(math.inf, math.inf),
    "mixed": Above(4.5, 7.0),
    "int16": Above(0.0, 0.0),
}
DEFAULT = "mixed"


def round_activations(ops: Sequence[FusedOp], activations: str) -> None:
    """Set ``remainder_above`` of all products. ``activations``: "auto", or one of `ACTIVATIONS`."""
    above = ACTIVATIONS[DEFAULT if activations == "auto" else activations]
    for op in ops:
        if isinstance(op, FusedLinear | FusedHead | FusedExperts):
            op.remainder_above = above.other if op.norm is None else above.normed
        if isinstance(op, FusedExperts):
            op.inner_remainder_above = above.other
