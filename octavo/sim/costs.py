"""The cost of a simulated step, by a model of step times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from octavo.core.batch import Batch, ScheduledRequest
from octavo.cost.pipeline import StageTimes
from octavo.cost.step_cost import StepModel

BatchCost = Callable[[Batch], float]  # seconds
BatchStageCost = Callable[[Batch], StageTimes]


class BatchCosts(NamedTuple):
    """Functions of a batch: the predicted seconds of its step, and their lower and upper bound."""

    value: BatchCost
    low: BatchCost
    high: BatchCost


def batch_costs(model: StepModel, block_size: int) -> BatchCosts:
    """Return costs that count a KV block once for all sequences that share it; ``block_size``: of
    the KV pool."""

    def shared(batch: Batch) -> int:
        return shared_keys(batch.items, block_size)

    return BatchCosts(
        lambda batch: model.seconds(batch, shared(batch)),
        lambda batch: model.cost(batch.items, batch.num_multi_steps, shared(batch)).total.low,
        lambda batch: model.cost(batch.items, batch.num_multi_steps, shared(batch)).total.high,
    )


def shared_keys(items: Iterable[ScheduledRequest], block_size: int) -> int:
    """Number of keys that a step needs not read again, since several sequences share their block;
    see ``RowCounts.shared_keys``."""
    tables: dict[int, list[list[int]]] = {}
    for item in items:
        if item.num_tokens == 1 or item.draft is not None:
            table = item.request.block_ids
            # Blocks are shared from the first on, or not at all.
            tables.setdefault(table[0], []).append(table)
    return block_size * sum(_num_shared(alike) for alike in tables.values() if len(alike) > 1)


def _num_shared(tables: list[list[int]]) -> int:
    return sum(map(len, tables)) - len(set().union(*tables))
