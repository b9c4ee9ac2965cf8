"""Advice at load about weights that another format would run faster with the same accuracy.

It states only measured facts (``benchmarks/kernels_linear.py --against-bf16``, the table of
docs/kernels.md; accuracy: the tables of docs/quantization.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.packing import PackedFormat
from octavo.quantization.base import Weight
from octavo.quantization.coded import CodedWeight

_log = logging.getLogger("octavo")


class Better(NamedTuple):
    """Integers of as many bits as the codes of a float format."""

    bits: int
    prompt: str  # share of the time for prompts
    made_by: str


_FOUR_BITS = Better(4, "a third", "--method gguf --type Q4_K_M, or gptq")
BETTER = {
    abi.OCT_NF4: _FOUR_BITS,
    abi.OCT_FP4: _FOUR_BITS,
    abi.OCT_E4M3: Better(8, "half or less", "--method gguf --type Q8_0, or smoothquant"),
}


def advise(weights: Mapping[str, Weight], entries: Mapping[str, tuple[PackedFormat, int]]) -> None:
    """Log a warning for ``weights`` with faster alternatives; ``entries`` are their packed formats
    and offsets."""
    for sentence in _sentences(weights, entries):
        _log.warning("%s", sentence)


def _sentences(
    weights: Mapping[str, Weight], entries: Mapping[str, tuple[PackedFormat, int]]
) -> Iterator[str]:
    coded = {name: weight for name, weight in weights.items() if isinstance(weight, CodedWeight)}
    formats = {name: entries[name][0].format for name in coded}
    for format, better in BETTER.items():
        kinds = {coded[name].format for name in coded if formats[name] == format}
        if kinds:
            yield (
                f"weights of {' and '.join(sorted(kinds))} are looked up and multiplied as floats: "
                f"integers of {better.bits} bits, as exact, take {better.prompt} of the time for "
                f"prompts, and less for tokens (octavo quantize {better.made_by})"
            )
    floats = [name for name in coded if entries[name][0].group == 0]
    if floats:
        yield (
            f"{len(floats)} of {len(coded)} quantized weights are kept as floats, in more bytes "
            f"and more time than their bits need, as no format of integers has their groups or "
            f"scales: {floats[0]}"
        )
