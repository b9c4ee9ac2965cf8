"""Where the memory of a GPU goes, line by line, and what of it is left for keys and values.

    keys and values = utilization x total - all other lines

A line is counted from shapes, measured by the driver or the allocator, or estimated as long as
neither can be done. What runs a model says its own lines before it takes the memory
(``Backend.planned_memory``); `octavo plan --memory` foresees the same ones with the constants and
formulas here, without weights and on any machine. Nothing in here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.base.errors import ConfigError

GIB = 1 << 30

LineSource = Literal["counted", "measured", "estimated"]

# Names of the lines that more than one module speaks of.
WEIGHTS = "weights"
KV = "keys and values"
GRAPHS = "recorded graphs"
STEP = "a step"  # what it allocates beyond all lines

# Of the driver, of loaded kernels and of cuBLAS, before anything is allocated. vLLM's logs have 0.1
# to 0.5 GiB of it on H100 (see octavo/cost/engine_profile.py); not measured with octavo.
CONTEXT_BYTES = 6 * GIB // 10
# Of one recorded step: its nodes and their arguments, as its tensors are the program's own. vLLM
# takes 0.3 GiB for some 35 sizes of small models; not measured with octavo.
GRAPH_BYTES = 16 << 20

_REMEDIES = {
    WEIGHTS: "a model of fewer bits (octavo quantize), or a smaller one",
    KV: "a smaller --kv-cache-memory or --num-blocks, --kv-cache-dtype fp8, or a smaller "
    "--max-model-len",
    GRAPHS: "--enforce-eager",
    STEP: "a smaller --gpu-memory-utilization",
}


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One use of memory. ``remedy`` is what makes it smaller, where a setting does."""

    name: str
    num_bytes: int
    known: LineSource
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a GPU as its driver and our allocator have them: what there is, what is free, and
    what this process holds in tensors, with what its allocator keeps for the next ones."""

    total: int
    free: int
    own: int


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """All lines of a GPU but the KV pool's, which is what they leave; once there is a pool, with
    its line (``with_pool``)."""

    total_bytes: int
    utilization: float
    lines: tuple[MemoryLine, ...]

    @property
    def usable_bytes(self) -> int:
        """That this engine, and whoever else is there already, may use."""
        return int(self.utilization * self.total_bytes)

    @property
    def taken_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def kv_bytes(self) -> int:
        """Left for keys and values; less than 0 is what is missing."""
        return self.usable_bytes - self.taken_bytes

    def with_pool(self, num_bytes: int) -> MemoryLedger:
        """With a KV pool of so many bytes."""
        pool = MemoryLine(KV, num_bytes, "counted", _REMEDIES[KV])
        return replace(self, lines=(*self.lines, pool))

    def check_first_block(self, num_bytes: int) -> None:
        """ConfigError if not even one block of so many bytes is left for the KV pool."""
        if self.kv_bytes < num_bytes:
            missing = gib(num_bytes - self.kv_bytes)
            raise self.out_of_memory(KV, f"{missing} are missing for their first block")

    def check_pool(self, num_bytes: int) -> None:
        """ConfigError if a KV pool of so many bytes does not fit, whatever the utilization: it may
        have been asked for by its size."""
        room = self.total_bytes - self.taken_bytes
        if num_bytes > room:
            raise self.out_of_memory(
                KV, f"a pool of {gib(num_bytes)}, and there is room for {gib(max(0, room))}"
            )

    def out_of_memory(self, name: str, problem: str) -> ConfigError:
        """The error of whom memory did not suffice for the line ``name``, with all lines and what
        makes them smaller."""
        remedies = dict.fromkeys(self._remedies(name))
        return ConfigError(
            f"the GPU's memory does not suffice for {name}: {problem}; "
            f"of {gib(self.total_bytes)}, {self.utilization:.0%} of which may be used, there go "
            + ", ".join(f"{gib(line.num_bytes)} to {line.name}" for line in self.lines)
            + f": try {'; or '.join(remedies)}"
        )

    def _remedies(self, name: str) -> Iterator[str]:
        """That of the line, and those of the greatest others."""
        if name in _REMEDIES:
            yield _REMEDIES[name]
        if self.utilization < 1.0 and name == KV:
            yield "a greater --gpu-memory-utilization"
        for line in sorted(self.lines, key=lambda line: -line.num_bytes):
            if line.remedy:
                yield line.remedy

    def described(self, kv_bytes: int) -> tuple[str, ...]:
        """A line of text for each, with a pool of ``kv_bytes`` as the last one."""
        return (
            f"GPU memory: {gib(self.total_bytes)}, of which {gib(self.usable_bytes)} may be used",
            *(
                f"GPU memory: {gib(line.num_bytes):>11}  {line.name} ({line.known})"
                for line in self.lines
            ),
            f"GPU memory: {gib(kv_bytes):>11}  {KV}",
        )

    def as_json(self, kv_bytes: int) -> dict[str, Any]:
        return {
            "total_bytes": self.total_bytes,
            "usable_bytes": self.usable_bytes,
            "kv_bytes": kv_bytes,
            "lines": [
                {"name": line.name, "bytes": line.num_bytes, "known": line.known}
                for line in self.lines
            ],
        }


def open_ledger(
    use: MemoryUse, utilization: float, weights_bytes: int, planned: Iterable[MemoryLine]
) -> MemoryLedger:
    """The ledger of a GPU that has a model's weights and nothing else of it.

    Args:
        use: now. weights_bytes: that are there. planned: what the engine will allocate.
    """
    others = use.total - use.free - use.own
    lines = (
        MemoryLine(WEIGHTS, weights_bytes, "counted", _REMEDIES[WEIGHTS]),
        MemoryLine("other tensors, such as a draft's", max(0, use.own - weights_bytes), "measured"),
        MemoryLine(
            "the CUDA context, and other programs",
            max(0, others),
            "measured",
            "ending other programs that use this GPU",
        ),
        *planned,
    )
    return MemoryLedger(use.total, utilization, tuple(line for line in lines if line.num_bytes))


def check_weights(use: MemoryUse, num_bytes: int) -> None:
    """ConfigError if weights of so many bytes do not fit: before the first of them is copied."""
    if num_bytes > use.free:
        raise open_ledger(use, 1.0, 0, ()).out_of_memory(
            WEIGHTS, f"they take {gib(num_bytes)}, and {gib(use.free)} are free"
        )


def activations_line(num_bytes: int, known: LineSource = "counted") -> MemoryLine:
    """Of the values of the largest step."""
    return MemoryLine(
        "activations of the largest step", num_bytes, known, "a smaller --max-num-batched-tokens"
    )


def tokens_line(num_bytes: int, known: LineSource = "counted") -> MemoryLine:
    """Of what a step is told, of its logits, and of what becomes of them."""
    return MemoryLine("inputs, logits and tokens", num_bytes, known, "a smaller --max-num-seqs")


def logits_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Of the rows that a step samples from, in float32."""
    return 4 * max_num_seqs * vocab_size


def scratch_line(num_bytes: int) -> MemoryLine:
    """Of what programs of a kernel leave to each other."""
    return MemoryLine("scratch of kernels", num_bytes, "counted")


def graphs_line(num_sizes: int) -> MemoryLine:
    """Of steps recorded at so many sizes, before they are."""
    return MemoryLine(GRAPHS, num_sizes * GRAPH_BYTES, "estimated", _REMEDIES[GRAPHS])


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
