"""Time of a step: the roofline of each operation, summed, and overheads.

    pass     sum of operations, times the stages of a pipeline, and of transfers between ranks
    step     sum of passes (one, or one for each step of a multi-step batch) + t0 + t1 x sequences

`StepModel.cost` says what a step is made of, and between what it lies; `StepModel.seconds` is the
same sum without the telling, for simulations, which ask for every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, Protocol

from octavo.cost.communication import Transfer, merge_transfers, transfers
from octavo.cost.efficiency import Efficiency, efficiency_of
from octavo.cost.hardware import Device
from octavo.cost.op_cost import Bound, OpCost, merge_ops, priced_ops
from octavo.cost.prediction import Prediction
from octavo.cost.rank_model import RankModel
from octavo.cost.work import Chunk, RowCounts, passes, seen_by_singles, seen_by_spans


class StepBatch(Protocol):
    """The parts of a `octavo.core.batch.Batch` that are needed."""

    @property
    def items(self) -> Sequence[Chunk]: ...
    @property
    def num_multi_steps(self) -> int: ...


class StepFeatures(NamedTuple):
    """Features by which a measured pass is looked up.

    ``decode_keys``: that sequences read which decode, those once that several of them share;
    ``decode_scores``, ``prompt_scores``: pairs of a query and a key that it sees, in sequences that
    decode and in pieces of prompts. All as if nothing had a window.
    """

    num_seqs: int
    num_tokens: int
    num_sampled: int
    num_prompt_tokens: int
    decode_keys: int
    decode_scores: int
    prompt_keys: int
    prompt_scores: int

    @classmethod
    def of(cls, rows: RowCounts) -> StepFeatures:
        singles = seen_by_singles(rows.singles, None)
        drafts = seen_by_spans(rows.drafts, None)
        prompts = seen_by_spans(rows.prompts, None)
        return cls(
            rows.num_seqs,
            rows.num_tokens,
            rows.num_sampled,
            sum(count for _, count in rows.prompts),
            singles.keys + drafts.keys - rows.shared_keys,
            singles.scores + drafts.scores,
            prompts.keys,
            prompts.scores,
        )


class PassTimes(Protocol):
    """Measured times of passes on this device, which replace the roofline where there are any."""

    def seconds(self, features: StepFeatures) -> float:
        """Seconds of one pass: operations and communication, without costs once a step."""
        ...

    def prediction(self, features: StepFeatures) -> Prediction:
        """The same, and how sure that is."""
        ...


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step until its tokens are there.

    Args:
        ops: of one rank, over all passes; in a pipeline, of its longest stage.
        transfers: between ranks, over all passes and stages.
        compute: all ops of all stages. comm: all transfers. overhead: what comes once a step.
    """

    ops: tuple[OpCost, ...]
    transfers: tuple[Transfer, ...]
    compute: Prediction
    comm: Prediction
    overhead: Prediction

    @property
    def total(self) -> Prediction:
        return self.compute + self.comm + self.overhead

    @property
    def bound(self) -> Bound:
        """The part that takes most of the time; ``latency``: launches, and all costs once a
        step."""
        seconds: dict[Bound, float] = {"memory": 0.0, "compute": 0.0}
        seconds |= {"latency": self.overhead.value, "communication": self.comm.value}
        stages = self.compute.value / (sum(op.seconds for op in self.ops) or 1.0)
        for op in self.ops:
            seconds[op.bound] += stages * op.seconds
        return max(seconds, key=seconds.__getitem__)


class StepModel:
    """A model on a device, as an engine runs it there.

    Args:
        model: what each rank holds. device: each of them. efficiency: how the engine does.
        measured: asked first for the time of each pass.

    Raises:
        ConfigError: the device has no peak for what the model computes in.
    """

    def __init__(
        self,
        model: RankModel,
        device: Device,
        efficiency: Efficiency,
        measured: PassTimes | None = None,
    ):
        self.model, self.device, self.efficiency = model, device, efficiency
        self._measured = measured
        self._ops = tuple(priced_ops(model, device, efficiency))
        alike = [matrix.num_sharing == 1 for matrix in model.matrices]
        alike += [False] * (len(self._ops) - len(alike))
        self._products = [op for op, is_alike in zip(self._ops, alike, strict=True) if is_alike]
        self._others = [op for op, is_alike in zip(self._ops, alike, strict=True) if not is_alike]
        # What products of all rows take depends on two numbers, which come again and again.
        self._product_seconds = lru_cache(maxsize=4096)(self._seconds_of_products)

    @classmethod
    def of(
        cls,
        model: RankModel,
        device: Device,
        profile_name: str = "octavo",
        *,
        eager: bool = False,
        measured: PassTimes | None = None,
    ) -> StepModel:
        """Make a model with the efficiency of an engine on a device; see `efficiency_of`."""
        efficiency = efficiency_of(profile_name, device, model.parallel, eager=eager)
        return cls(model, device, efficiency, measured)

    def seconds(self, batch: StepBatch, shared_keys: int = 0) -> float:
        """Seconds of a step: ``cost(batch.items, batch.num_multi_steps,
        shared_keys).total.value``."""
        num_seqs, total = 0, 0.0
        for rows in passes(batch.items, batch.num_multi_steps, shared_keys):
            num_seqs = max(num_seqs, rows.num_seqs)
            total += self.pass_seconds(rows)
        return total + self.overhead(num_seqs)

    def cost(
        self, chunks: Iterable[Chunk], num_multi_steps: int = 1, shared_keys: int = 0
    ) -> StepCost:
        """Cost of a step, with its parts. ``shared_keys``: as in `octavo.cost.work.RowCounts`; only
        measurements know their worth."""
        done = [self._pass_cost(rows) for rows in passes(chunks, num_multi_steps, shared_keys)]
        return StepCost(
            merge_ops(chain.from_iterable(each.ops for each in done)),
            merge_transfers(chain.from_iterable(each.transfers for each in done)),
            _sum(each.compute for each in done),
            _sum(each.comm for each in done),
            self._overhead(max(each.num_seqs for each in done)),
        )

    def prediction(
        self, chunks: Iterable[Chunk], num_multi_steps: int = 1, shared_keys: int = 0
    ) -> Prediction:
        """``cost(...).total``, without its parts: a plan asks for thousands."""
        if self._measured is not None:
            return self.cost(chunks, num_multi_steps, shared_keys).total
        num_seqs = 0
        done: list[tuple[Prediction, Prediction]] = []
        for rows in passes(chunks, num_multi_steps, shared_keys):
            num_seqs = max(num_seqs, rows.num_seqs)
            done.append((self._compute(rows), self._comm(self._transfers(rows))))
        compute, comm = (_sum(each) for each in zip(*done, strict=True))
        return compute + comm + self._overhead(num_seqs)

    def _compute(self, rows: RowCounts) -> Prediction:
        """The sum of the predictions of all operations."""
        value = low = high = 0.0
        for op in self._ops:
            one = op.ends(op.work(rows))
            value, low, high = value + one[0], low + one[1], high + one[2]
        return Prediction(value, low, high, self.efficiency.source)

    def _comm(self, said: Sequence[Transfer]) -> Prediction:
        seconds = sum(each.seconds for each in said)
        return Prediction.around(seconds, self.efficiency.spread, self.efficiency.source)

    def _overhead(self, num_seqs: int) -> Prediction:
        spread, source = self.efficiency.overhead_spread, self.efficiency.overhead_source
        return Prediction.around(self.overhead(num_seqs), spread, source)

    def pass_seconds(self, rows: RowCounts) -> float:
        """Cost of one pass, without costs once a step."""
        if self._measured is not None and rows.num_tokens:
            return self._measured.seconds(StepFeatures.of(rows))
        total = self._product_seconds(rows.num_tokens, rows.num_sampled)
        for op in self._others:
            total += op.stages * op.seconds(op.work(rows))
        return total + sum(each.seconds for each in self._transfers(rows))

    def chunk_seconds(self, num_tokens: int) -> float:
        """Cost of a pass of so many prompt tokens, of which none is sampled after, but for
        attention: that takes as long for all chunks of a prompt together however it is cut."""
        return self.pass_seconds(RowCounts(num_tokens, 0, []))

    def _seconds_of_products(self, num_tokens: int, num_sampled: int) -> float:
        rows = RowCounts(num_tokens, num_sampled, [])
        return sum([op.stages * op.seconds(op.work(rows)) for op in self._products], 0.0)

    def _pass_cost(self, rows: RowCounts) -> _PassCost:
        works = [(op, op.work(rows)) for op in self._ops]
        said = self._transfers(rows)
        found = _PassCost(
            rows.num_seqs,
            [op.cost(work) for op, work in works if work.bytes or work.flops],
            said,
            _sum(op.prediction(work) for op, work in works),
            self._comm(said),
        )
        if self._measured is None or not rows.num_tokens:
            return found
        return found.scaled_to(self._measured.prediction(StepFeatures.of(rows)))

    def _transfers(self, rows: RowCounts) -> Sequence[Transfer]:
        link = self.efficiency.link
        return () if link is None else transfers(self.model, rows, link)

    def overhead(self, num_seqs: int) -> float:
        """Seconds that come once a step of so many sequences."""
        return self.efficiency.step_s + num_seqs * self.efficiency.sequence_s


@dataclass(frozen=True, slots=True)
class _PassCost:
    """A `StepCost` of one pass, without what comes once a step."""

    num_seqs: int
    ops: Sequence[OpCost]
    transfers: Sequence[Transfer]
    compute: Prediction
    comm: Prediction

    def scaled_to(self, known: Prediction) -> _PassCost:
        """Scale a pass to its measured time as a whole: its parts keep their shares."""
        predicted = self.compute.value + self.comm.value
        factor = known.value / predicted
        return _PassCost(
            self.num_seqs,
            [replace(op, seconds=op.seconds * factor) for op in self.ops],
            [replace(each, seconds=each.seconds * factor) for each in self.transfers],
            known * (self.compute.value / predicted),
            known * (self.comm.value / predicted),
        )


def _sum(predictions: Iterable[Prediction]) -> Prediction:
    first, *rest = predictions
    return sum(rest, first)
