"""Snapshots of a running engine, with the requests of a step and a map of the block pool.

They are made only while a client watches, and slow ones seldom: rows of steps and pictures of the
pool take a fifth of a percent of the engine's time at most, whatever their sizes.
"""

from __future__ import annotations

from itertools import chain, groupby
from typing import Any

from octavo.core.batch import ScheduledRequest
from octavo.core.block_pools import Blocks
from octavo.core.engine import Engine, EngineStep
from octavo.core.kv_tables import GONE
from octavo.core.request import Request

_SHARE = 0.001  # of the time, for rows, and again for pictures
_ROWS_INTERVAL = 0.02  # seconds between two steps whose rows are shown, at least
_INTERVAL = 0.5  # and between two pictures
_MOST_CELLS = 2048  # of a map: of a larger pool it shows every second block, or third, ...
_MOST_PARTS = 40  # of the prefix cache

# Holders of a block other than a request, which has its index.
FREE, CACHED, SHARED, LEAVING = -1, -2, -3, -4


class EngineSnapshot:
    """Makes snapshots of an engine between its steps."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._rows_due_at = self._picture_due_at = 0.0

    @property
    def seconds_to_picture(self) -> float:
        """Seconds until the next picture is due; 0 if it is."""
        return max(0.0, self._picture_due_at - self._engine.clock.now())

    def at_step(self, step: EngineStep) -> dict[str, Any]:
        """Return the ``rows`` of a step and the requests it ``preempted``, and a picture, each
        if it is due: an empty mapping if both were made a moment ago."""
        clock = self._engine.clock
        look: dict[str, Any] = {}
        begin = clock.now()
        if begin >= self._rows_due_at:
            look = {"rows": step_rows(step), "preempted": step.batch.preempted_ids}
            self._rows_due_at = begin + max(_ROWS_INTERVAL, (clock.now() - begin) / _SHARE)
        if begin >= self._picture_due_at:
            look |= self.picture()
        return look

    def picture(self) -> dict[str, Any]:
        """Return the block ``pool`` and the ``prefixes`` that are cached in it, as they are now."""
        clock, scheduler = self._engine.clock, self._engine.scheduler
        begin = clock.now()
        blocks = scheduler.block_manager
        picture = {
            "pool": pool_map(blocks, scheduler.running),
            "prefixes": blocks.prefix_cache.largest_parts(_MOST_PARTS),
        }
        end = clock.now()
        self._picture_due_at = end + max(_INTERVAL, (end - begin) / _SHARE)
        return picture


def step_rows(step: EngineStep) -> list[tuple[Any, ...]]:
    """Return for each request in a step: its id, the position of its first token, and the
    numbers of tokens computed (drafts apart), of new tokens, and of drafted and accepted ones."""
    new = {update.request: update.new_token_ids for update in step.updates}
    return [_row(item, new.get(item.request, [])) for item in step.batch.items]


def _row(item: ScheduledRequest, new: list[int]) -> tuple[Any, ...]:
    num_drafted = num_accepted = 0
    if item.draft is not None:
        num_drafted, num_accepted = len(item.draft), len(item.draft.path(new))
    num_known = item.num_tokens - num_drafted
    return item.request.request_id, item.start, num_known, len(new), num_drafted, num_accepted


def pool_map(blocks: Blocks, running: list[Request]) -> dict[str, Any]:
    """Return the holders of blocks as runs: ``[who, how many, who, ...]``, in the order of the
    blocks.

    ``who`` is an index into ``requests``, or FREE, CACHED, SHARED by several requests, or held by
    one that has ended and is LEAVING with the step that it is in. ``every``: the map has one of so
    many blocks.
    """
    every = -(-blocks.num_blocks // _MOST_CELLS)
    holders = [_holder(blocks, block_id) for block_id in range(0, blocks.num_blocks, every)]
    for index, request in enumerate(running):
        for block_id in chain(*request.block_tables):
            if block_id != GONE and block_id % every == 0:
                cell = block_id // every
                holders[cell] = index if holders[cell] != SHARED else SHARED
    runs = [(who, len(list(run))) for who, run in groupby(holders)]
    return {
        "num_blocks": blocks.num_blocks,
        "every": every,
        "requests": [request.request_id for request in running],
        "runs": list(chain(*runs)),
    }


def _holder(blocks: Blocks, block_id: int) -> int:
    """Return the holder of a block that no running request is known to hold."""
    if count := blocks.ref_counts[block_id]:
        return LEAVING if count == 1 else SHARED
    return CACHED if block_id in blocks.prefix_cache else FREE
