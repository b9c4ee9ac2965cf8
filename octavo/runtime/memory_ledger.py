"""A ledger of a GPU's memory: a line for each use, and the rest for the KV cache.

    KV cache = utilization x total - all other lines

A line is counted from shapes, measured by the driver or the allocator, or estimated where neither
is possible. A backend declares its lines before it allocates the memory
(``Backend.planned_memory``); `octavo plan --memory` predicts the same ones with the constants and
formulas here, without weights and on any machine. Nothing in here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.base.errors import ConfigError

GIB = 1 << 30

LineSource = Literal["counted", "measured", "estimated"]

# Names of lines that several modules use.
WEIGHTS = "weights"
KV = "KV cache"
GRAPHS = "recorded graphs"
STEP = "a step"  # its allocations beyond all lines

# Memory of the driver, loaded kernels and cuBLAS, before anything is allocated: 0.74 GiB on an H200
# (CUDA 13.0, PyTorch 2.11).
CONTEXT_BYTES = 74 * GIB // 100
# Memory of one captured step: its nodes and their arguments; its tensors are the program's. vLLM
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
    """Bytes of a GPU as its driver and PyTorch report them: ``own`` is what this process holds in
    tensors and in the allocator's cache."""

    total: int
    free: int
    own: int


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """The lines of a GPU's memory. Before ``with_pool`` there is none for the KV pool, which gets
    the rest."""

    total_bytes: int
    utilization: float
    lines: tuple[MemoryLine, ...]

    @property
    def usable_bytes(self) -> int:
        """Bytes that this engine and other programs on the GPU may use together."""
        return int(self.utilization * self.total_bytes)

    @property
    def taken_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def kv_bytes(self) -> int:
        """Bytes left for the KV pool; negative if the other lines exceed the usable memory."""
        return self.usable_bytes - self.taken_bytes

    def with_pool(self, num_bytes: int) -> MemoryLedger:
        """Return the ledger with a line for a KV pool of ``num_bytes``."""
        pool = MemoryLine(KV, num_bytes, "counted", _REMEDIES[KV])
        return replace(self, lines=(*self.lines, pool))

    def check_first_block(self, num_bytes: int) -> None:
        """Raise ConfigError if not even one block of ``num_bytes`` is left for the KV pool."""
        if self.kv_bytes < num_bytes:
            missing = gib(num_bytes - self.kv_bytes)
            raise self.out_of_memory(KV, f"{missing} are missing for its first block")

    def check_pool(self, num_bytes: int) -> None:
        """Raise ConfigError if a KV pool of ``num_bytes`` does not fit on the GPU, regardless of
        the utilization: a user may have set its size."""
        room = self.total_bytes - self.taken_bytes
        if num_bytes > room:
            raise self.out_of_memory(
                KV, f"a pool of {gib(num_bytes)}, and there is room for {gib(max(0, room))}"
            )

    def out_of_memory(self, name: str, problem: str) -> ConfigError:
        """Return the error of a line ``name`` that did not fit: with all lines, and the settings
        that make them smaller."""
        remedies = dict.fromkeys(self._remedies(name))
        return ConfigError(
            f"the GPU's memory does not suffice for {name}: {problem}; "
            f"of {gib(self.total_bytes)}, {self.utilization:.0%} of which may be used, there go "
            + ", ".join(f"{gib(line.num_bytes)} to {line.name}" for line in self.lines)
            + f": try {'; or '.join(remedies)}"
        )

    def _remedies(self, name: str) -> Iterator[str]:
        """Yield the remedies of a line, and then those of the others, the largest first."""
        if name in _REMEDIES:
            yield _REMEDIES[name]
        if self.utilization < 1.0 and name == KV:
            yield "a greater --gpu-memory-utilization"
        for line in sorted(self.lines, key=lambda line: -line.num_bytes):
            if line.remedy:
                yield line.remedy

    def described(self, kv_bytes: int) -> tuple[str, ...]:
        """Return a text line for each use, with a KV pool of ``kv_bytes`` as the last one."""
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
    """Open the ledger of a GPU on which of this engine only the weights are allocated.

    Args:
        use: the GPU's memory now.
        weights_bytes: the size of the weights.
        planned: the lines of memory that the engine will allocate.
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
    """Raise ConfigError if weights of ``num_bytes`` do not fit, before any is copied."""
    if num_bytes > use.free:
        raise open_ledger(use, 1.0, 0, ()).out_of_memory(
            WEIGHTS, f"they take {gib(num_bytes)}, and {gib(use.free)} are free"
        )


def activations_line(num_bytes: int, known: LineSource = "counted") -> MemoryLine:
    """Return the line of the largest step's activations."""
    return MemoryLine(
        "activations of the largest step", num_bytes, known, "a smaller --max-num-batched-tokens"
    )


def tokens_line(num_bytes: int, known: LineSource = "counted") -> MemoryLine:
    """Return the line of a step's inputs, its logits and its sampled tokens."""
    return MemoryLine("inputs, logits and tokens", num_bytes, known, "a smaller --max-num-seqs")


def logits_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Return the size of a step's logits in float32."""
    return 4 * max_num_seqs * vocab_size


def scratch_line(num_bytes: int) -> MemoryLine:
    """Return the line of the scratch memory of kernels."""
    return MemoryLine("scratch of kernels", num_bytes, "counted")


def graphs_line(num_sizes: int) -> MemoryLine:
    """Return the line of CUDA graphs of ``num_sizes`` steps, estimated before their capture."""
    return MemoryLine(GRAPHS, num_sizes * GRAPH_BYTES, "estimated", _REMEDIES[GRAPHS])


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
