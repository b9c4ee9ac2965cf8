"""How exactly the activations of a step meet its quantized weights.

In one int8 each, with a scale for each group; or in two, of which the second holds what the first
leaves: 15 bits, as exact as float16. The second costs nothing where a step waits for memory, and
twice the products where it computes, as in prompts. All linears lose by rounding; the head, and the
projections of queries, keys and values, lose the most for the products that they have
(docs/kernels.md has the table).
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.kernels.cpu.fusion import Attention, Head, Linear, Phase

# What has two parts.
ACTIVATIONS = {
    "int8": "nothing",
    "mixed": "what attention's projections and the head read",
    "int16": "everything",
}
DEFAULT = "int8"


def split_activations(phases: Sequence[Phase], activations: str) -> None:
    """Set ``parts`` of all linears. ``activations``: "auto", or one of `ACTIVATIONS`."""
    choice = DEFAULT if activations == "auto" else activations
    seen_by_attention = {
        id(value.source)
        for phase in phases
        if isinstance(phase, Attention)
        for value in (phase.q, phase.k, phase.v)
    }
    for phase in phases:
        if isinstance(phase, Head):
            is_split = choice != "int8"
        elif isinstance(phase, Linear):
            is_projection = any(
                id(segment.out.source) in seen_by_attention for segment in phase.segments
            )
            is_split = choice == "int16" or (choice == "mixed" and is_projection)
        else:
            continue
        phase.parts = 2 if is_split else 1
