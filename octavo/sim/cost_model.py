"""What a step has to do, in bytes and operations, and the time that takes.

The counting (`ModelCost.work`) and the clock are apart: the same counts tell the simulator how long
a step would take, and a benchmark how close a measured one came to what the device can do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.core.batch import Batch
from octavo.core.executor import WeightMatrix
from octavo.sim.hardware import HardwareSpec


class Chunk(Protocol):
    """Tokens ``[start, start + num_tokens)`` of a request; see `octavo.core.batch`.

    ``samples``: whether the token after them is wanted.
    """

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def samples(self) -> bool: ...


class ModelShape(Protocol):
    """What attention costs follows from these fields of a ``ModelConfig``."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def layer_windows(self) -> tuple[int | None, ...]: ...


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to move between memory and processor, and operations to do.

    A multiplication and the addition that follows it are two operations.
    """

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one or more steps: matrix products, those of the output head apart, attention."""

    linear: Work = Work()
    head: Work = Work()
    attention: Work = Work()

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.linear + other.linear,
            self.head + other.head,
            self.attention + other.attention,
        )

    @property
    def total(self) -> Work:
        return self.linear + self.head + self.attention


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Layers of which a query sees the same positions.

    Args:
        width: layers x query heads x head dimension.
        kv_bytes_per_token: keys and values of these layers.
        window: the last positions that a query sees, its own included; None is all.
    """

    width: int
    kv_bytes_per_token: float
    window: int | None = None

    def work(self, spans: Sequence[tuple[int, int]]) -> Work:
        """Of (start, number) of the new tokens of each sequence, whose keys are read once."""
        keys = scores = 0
        for start, num_tokens in spans:
            end = start + num_tokens
            # The new keys are written, and then read with the others.
            keys += num_tokens
            keys += end if self.window is None else min(end, num_tokens + self.window - 1)
            scores += _causal_scores(end, self.window) - _causal_scores(start, self.window)
        return Work(keys * self.kv_bytes_per_token, 4.0 * self.width * scores)


def _causal_scores(num_tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, among the first tokens of a sequence."""
    growing = num_tokens if window is None else min(num_tokens, window)
    return growing * (growing + 1) // 2 + (num_tokens - growing) * growing


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What the work of a step depends on, of a decoder-only transformer.

    Args:
        linear_params: weights of all matrix products but the embedding and the output head.
        linear_bytes: of what a step reads of them; quantization shows here.
        head_params, head_bytes: the same of the output head, vocabulary x hidden.
        attention: the layers, those of one window together.
    """

    linear_params: int
    linear_bytes: float
    head_params: int
    head_bytes: float
    attention: tuple[AttentionCost, ...]

    @classmethod
    def of(
        cls, config: ModelShape, matrices: Iterable[WeightMatrix], kv_bytes_per_token: float
    ) -> ModelCost:
        """Of a model by its config, before it is loaded, or as an engine has it.

        Args:
            matrices, kv_bytes_per_token: planned (`octavo.models.footprint`), or those of an
                engine's `Executor.probe()`.
        """
        layers: list[WeightMatrix] = []
        heads: list[WeightMatrix] = []
        for matrix in matrices:
            (heads if matrix.is_head else layers).append(matrix)
        windows = Counter(config.layer_windows or (None,) * config.num_layers)
        per_layer = kv_bytes_per_token / config.num_layers
        width = config.num_heads * config.head_dim
        return cls(
            sum(matrix.num_params for matrix in layers),
            sum(matrix.num_bytes for matrix in layers),
            sum(matrix.num_params for matrix in heads),
            sum(matrix.num_bytes for matrix in heads),
            tuple(
                AttentionCost(count * width, count * per_layer, window)
                for window, count in windows.items()
            ),
        )

    @property
    def weights_bytes(self) -> float:
        """What a step reads of the weights."""
        return self.linear_bytes + self.head_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return sum(layers.kv_bytes_per_token for layers in self.attention)

    @property
    def flops_per_token(self) -> float:
        """Of the matrix products, for a token from which another one is sampled; attention's depend
        on where it stands."""
        return 2.0 * (self.linear_params + self.head_params)

    def work(self, chunks: Iterable[Chunk], num_rounds: int = 1) -> StepWork:
        """The least that a step with these chunks does: every weight is read once, the head where
        something is sampled; embeddings, norms and activations do not count.

        In rounds after the first, each chunk that samples goes on with one token, and all weights
        are read again.
        """
        chunks = list(chunks)
        sampling = [chunk.start + chunk.num_tokens for chunk in chunks if chunk.samples]
        done = self._round([(chunk.start, chunk.num_tokens) for chunk in chunks], len(sampling))
        for later in range(num_rounds - 1):
            done += self._round([(end + later, 1) for end in sampling], len(sampling))
        return done

    def _round(self, spans: Sequence[tuple[int, int]], num_sampled: int) -> StepWork:
        num_tokens = sum(count for _, count in spans)
        return StepWork(
            Work(self.linear_bytes, 2.0 * self.linear_params * num_tokens),
            Work(self.head_bytes if num_sampled else 0.0, 2.0 * self.head_params * num_sampled),
            sum((layers.work(spans) for layers in self.attention), Work()),
        )


class _Rows(NamedTuple):
    """A chunk whose last row samples."""

    start: int
    num_tokens: int
    samples: bool = True


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Seconds of a batch; pass it to `octavo.executor.simulated.SimulatedExecutor`.

    A roofline (Williams et al., CACM 2009) for each of two parts, matrix products and attention: a
    part takes the longer of its memory time and its compute time, and the parts follow each other.
    """

    model: ModelCost
    hardware: HardwareSpec

    def __call__(self, batch: Batch) -> float:
        return self.seconds(self.model.work(batch.items, batch.num_rounds))

    def verification(self, num_seqs: int, rows: int, context: int) -> float:
        """Of a step in which each of ``num_seqs`` sequences of ``context`` tokens computes so many
        rows and samples at all of them, as drafts are verified; one row is plain decoding."""
        row = self.model.work([_Rows(context, 1)])
        sequence = self.model.work([_Rows(context, rows)])
        num_rows = num_seqs * rows
        return self.seconds(
            StepWork(  # weights are read once, and keys once for each sequence
                Work(row.linear.bytes, row.linear.flops * num_rows),
                Work(row.head.bytes, row.head.flops * num_rows),
                Work(sequence.attention.bytes * num_seqs, sequence.attention.flops * num_seqs),
            )
        )

    def seconds(self, work: StepWork) -> float:
        products = self.hardware.seconds(
            work.linear.bytes + work.head.bytes, work.linear.flops + work.head.flops
        )
        attention = self.hardware.seconds(work.attention.bytes, work.attention.flops)
        return products + attention + self.hardware.step_overhead
