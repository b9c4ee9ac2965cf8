"""Warnings about the size of a quantized model, given before the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from octavo.models.config import HEAD
from octavo.models.footprint import choosable
from octavo.models.parameters import Parameters
from octavo.quantization.ggml_types import GGMLType, block_shape, row_bytes

_MUCH = 0.3  # of a model's bits
_FLOAT_BITS = 16
_EIGHT_BITS = 8  # from here on a small file is not expected
# The nearest types with blocks of 32 for those with blocks of 256, for advice.
_OF_32 = {
    GGMLType.Q2_K: "Q4_0",
    GGMLType.Q3_K: "Q4_0",
    GGMLType.Q4_K: "IQ4_NL or Q4_1",
    GGMLType.Q5_K: "Q5_1",
    GGMLType.Q6_K: "Q8_0",
    GGMLType.IQ4_XS: "IQ4_NL",
}


def warn_of_embeddings(parameters: Parameters, bits: float, target_bpw: float | None) -> str | None:
    """Warn if a folder's embedding and head, which are not quantized, take much of its size.

    Args:
        bits: bits of the weights of all other matrices, without a target.
    """
    num_weights = sum(prod(parameters.shape(name)) for name in parameters.names)
    num_chosen = sum(shape.n * shape.k for shape in choosable(parameters.config))
    rest = _FLOAT_BITS * (num_weights - num_chosen)
    total = rest + bits * num_chosen if target_bpw is None else target_bpw * num_weights
    is_small = target_bpw is not None or bits < _EIGHT_BITS
    if not num_chosen or not is_small or rest < _MUCH * total:
        return None
    is_alone = HEAD not in parameters.names
    what = "the embedding stays" if is_alone else "embedding and head stay"
    left = (total - rest) / num_chosen
    if left < 2:  # no mix is as small, which raises an error later
        return None
    left_to = f", leaving {left:.1f} bits a weight to all others" if target_bpw else ""
    return (
        f"{what} at 16 bits in a folder: that is {rest / total:.0%} of it{left_to}. A GGUF file "
        "of the same size quantizes them too, and loses less: --method gguf --target-bpw "
        f"{total / num_weights:.2f}"
    )


@dataclass(frozen=True, slots=True)
class TypeFit:
    """A matrix of a GGUF file: its type in the target mix, and the one that fits its rows."""

    name: str
    shape: tuple[int, int]
    wanted: GGMLType
    got: GGMLType


def warn_of_rows(target: str, fits: Iterable[TypeFit]) -> str | None:
    """Warn if rows are not whole blocks of a target's types, and so get larger types."""
    fits = list(fits)
    others = [fit for fit in fits if fit.got != fit.wanted]
    if not others:
        return None
    num_weights = sum(prod(fit.shape) for fit in fits)
    promised = sum(prod(fit.shape) * _bits(fit.wanted) for fit in fits) / num_weights
    bits = sum(prod(fit.shape) * _bits(fit.got) for fit in fits) / num_weights
    became = Counter((fit.shape[1], fit.wanted.name, fit.got.name) for fit in others)
    listed = "; ".join(
        f"{count} with rows of {columns:,} are {got}, not {wanted}"
        for (columns, wanted, got), count in became.most_common()
    )
    example = next(fit.name for fit in others)
    return (
        f"{target} does not fit {len(others)} of {len(fits)} matrices, such as {example}: {listed}."
        f" The matrices have {bits:.2f} bits a weight, not {promised:.2f}. {_advice(others)}"
    )


def _bits(type: GGMLType) -> float:
    size = block_shape(type)[0]
    return row_bytes(type, size) * 8 / size


def _advice(others: list[TypeFit]) -> str:
    if any(fit.shape[1] % 32 for fit in others):
        return "No small type of GGUF files fits such rows: write a folder, as with --method gptq"
    most = Counter(fit.wanted for fit in others).most_common(1)[0][0]
    return f"A type with blocks of 32 fits: --type {_OF_32.get(most, 'Q8_0')}"
