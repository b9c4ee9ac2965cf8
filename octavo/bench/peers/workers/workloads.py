"""Workloads of a comparison, and the figures of each.

Standard library only: the workers of all engines import it, each in its own environment.

Work is counted alike for all engines. A prompt of P tokens and an answer of N are P + N - 1 tokens
of computing: the prompt's last position gives the first token of the answer, so N tokens are N - 1
steps of decoding.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

# Times their mean, the longest prompts of a mix: no single one is to dominate it.
_LONGEST = 8


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """A workload: ``num_seqs`` prompts of ``input_len`` random tokens at once, ``output_len``
    answered to each.

    ``kind``: "prefill" and "decode" are of one request; "batch" is of many at once; "start" is a
    new process, to its first token; "mix" is of prompts whose lengths are log-normal, ``length_cv``
    times their mean being the deviation. ``repeat``: runs in a round, whose median counts.
    """

    name: str
    title: str
    kind: str
    num_seqs: int
    input_len: int
    output_len: int
    repeat: int
    length_cv: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def prompts(self, seed: int, vocab_size: int, repetition: int) -> list[list[int]]:
        """Return the prompts: the same for all engines with that vocabulary, and new in every round
        and repetition, so that no prefix cache has them. The first ids are special tokens in many
        models."""
        rng = random.Random(f"{self.name} {seed} {repetition}")
        first = min(1000, vocab_size // 2)
        return [
            [rng.randrange(first, vocab_size) for _ in range(self._length(rng))]
            for _ in range(self.num_seqs)
        ]

    def _length(self, rng: random.Random) -> int:
        if not self.length_cv:
            return self.input_len
        sigma = math.sqrt(math.log1p(self.length_cv**2))
        drawn = rng.lognormvariate(math.log(self.input_len) - sigma**2 / 2, sigma)
        return min(max(1, round(drawn)), _LONGEST * self.input_len)


WORKLOADS = {
    workload.name: workload
    for workload in (
        PeerWorkload("decode", "decode, 128 tokens after 128", "decode", 1, 128, 129, 3),
        PeerWorkload("decode-1k", "decode, 128 tokens after 1,024", "decode", 1, 1024, 129, 2),
        PeerWorkload("prefill", "prefill of 512", "prefill", 1, 512, 1, 3),
        PeerWorkload("batch-32", "32 × (128 in, 128 out)", "batch", 32, 128, 128, 1),
        PeerWorkload("batch-64", "64 × (128 in, 128 out)", "batch", 64, 128, 128, 1),
        PeerWorkload("start", "process start to first token", "start", 1, 1, 1, 1),
    )
}


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """One figure of a workload, as the table and the JSON file name it."""

    name: str
    title: str
    higher_is_better: bool = True


OUTPUT_TPS = PeerFigure("output_tps", "output tokens/s, prefill included")
DECODE_TPS = PeerFigure("decode_tps", "decode tokens/s")
PREFILL_TPS = PeerFigure("prefill_tps", "prefill tokens/s")
START_S = PeerFigure("start_s", "s", higher_is_better=False)

FIGURES = {
    "decode": (DECODE_TPS,),
    "prefill": (PREFILL_TPS,),
    "batch": (OUTPUT_TPS, DECODE_TPS, PREFILL_TPS),
    "mix": (OUTPUT_TPS,),
    "start": (START_S,),
}


def batch_figures(workload: PeerWorkload, whole_s: float, prefill_s: float) -> dict[str, float]:
    """Return the figures of a batch from the time of the whole run and that of the prompts
    alone."""
    decoded = workload.num_seqs * (workload.output_len - 1)
    return {
        "output_tps": workload.num_seqs * workload.output_len / whole_s,
        "decode_tps": decoded / (whole_s - prefill_s),
        "prefill_tps": workload.num_seqs * workload.input_len / prefill_s,
    }
