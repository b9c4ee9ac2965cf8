"""What the steps of a simulated engine take, by a model of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from octavo.core.batch import Batch, ScheduledRequest
from octavo.cost.step_cost import StepModel

Cost = Callable[[Batch], float]  # seconds


class Costs(NamedTuple):
    """Of steps: what they take, and the least and the most that they may."""

    value: Cost
    low: Cost
    high: Cost


def costs(model: StepModel, block_size: int) -> Costs:
    """By a model that knows what sharing is worth; ``block_size``: of the KV pool."""

    def shared(batch: Batch) -> int:
        return shared_keys(batch.items, block_size)

    return Costs(
        lambda batch: model.seconds(batch, shared(batch)),
        lambda batch: model.cost(batch.items, batch.num_multi_steps, shared(batch)).total.low,
        lambda batch: model.cost(batch.items, batch.num_multi_steps, shared(batch)).total.high,
    )


def shared_keys(items: Iterable[ScheduledRequest], block_size: int) -> int:
    """The ``Rows.shared_keys`` of a step, by the block tables of its requests."""
    tables: dict[int, list[list[int]]] = {}
    for item in items:
        if item.num_tokens == 1 or item.draft is not None:
            table = item.request.block_ids
            # Blocks are shared from the first on, or not at all.
            tables.setdefault(table[0], []).append(table)
    return block_size * sum(_num_shared(alike) for alike in tables.values() if len(alike) > 1)


def _num_shared(tables: list[list[int]]) -> int:
    return sum(map(len, tables)) - len(set().union(*tables))
