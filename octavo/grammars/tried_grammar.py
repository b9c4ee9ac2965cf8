"""`TriedGrammar`: the grammar of a constraint, and what it took to compile it and to follow it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from octavo.grammars.sources import GrammarSource

# Of one that was compiled without a measurement: much more than most take.
_BYTES = 256 << 10
_BYTES_PER_CHARACTER = 16
_BYTES_PER_MASK = 512.0

# All states that the lexer of a grammar may have (`parser_limits`).
_MOST_BYTES_OF_MASKS = 40 << 20


@dataclass(frozen=True, slots=True)
class TriedGrammar:
    """A grammar that can be compiled within bounds.

    Args:
        seconds: of a processor, that compiling took.
        num_bytes: of memory, compiled and after some masks.
        bytes_per_mask: by which each further mask made it grow: states of the lexer are kept.
    """

    source: GrammarSource
    seconds: float
    num_bytes: int
    bytes_per_mask: float

    @classmethod
    def unmeasured(cls, source: GrammarSource, seconds: float) -> TriedGrammar:
        """Return the grammar of a constraint that was compiled here, with careful estimates."""
        return cls(
            source, seconds, _BYTES + _BYTES_PER_CHARACTER * len(source.text), _BYTES_PER_MASK
        )

    @classmethod
    def of(cls, values: dict[str, Any]) -> TriedGrammar:
        """Return the grammar of which `to_dict` made these values, maybe through JSON."""
        source = GrammarSource(
            **values["source"] | {"openings": tuple(values["source"]["openings"])}
        )
        return cls(source, values["seconds"], values["num_bytes"], values["bytes_per_mask"])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def bytes_after(self, num_masks: int) -> int:
        """Return the memory that it takes, compiled, after so many masks."""
        return self.num_bytes + int(min(_MOST_BYTES_OF_MASKS, self.bytes_per_mask * num_masks))
