"""One client of ``GET /steps?snapshots=true``, the dashboard: snapshots and requests beside
steps."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from octavo.base.errors import ConfigError
from octavo.core.stats import StepStats
from octavo.cost.step_facts import rank_model_of_json
from octavo.cost.this_machine import device_of_engine
from octavo.server.engine.generation import EngineClient, EngineFacts, EngineState, Generation
from octavo.server.watch.step_viewer import StepViewer, named

_MOST = 1000  # requests that have ended, and rows of steps, that wait for a viewer
_GAPS_PER_OCTAVE = 8  # buckets of inter-token latency, each 9 % wide, from a microsecond on
# Fields sent for each step; of totals and of the engine's state the last ones are enough.
_OF_EACH_STEP = (
    "step_id",
    "num_tokens",
    "num_prompt_tokens",
    "seconds",
    "step_seconds",
    "memory_seconds",
    "compute_seconds",
    "num_memory_bound",
    "num_compute_bound",
    "num_overhead_bound",
)
_values_of_step = attrgetter(*_OF_EACH_STEP)
_FIGURES = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_preemptions",
    "queue_time",
    "ttft",
    "tpot",
    "e2e",
)


class SnapshotViewer(StepViewer):
    """A viewer that also gets snapshots.

    Args:
        about: returns facts about the engine, once it is ready.
        replicas: describes the replicas, where there are several.
    """

    def __init__(
        self,
        on_close: Callable[[StepViewer], None],
        about: Callable[[], dict[str, Any]],
        replicas: Callable[[], list[dict[str, Any]]] = list,
    ):
        super().__init__(on_close)
        self._about = about
        self._replicas = replicas
        self._shown_replicas: list[dict[str, Any]] = []
        self._snapshots: dict[int | None, deque[dict[str, Any]]] = {}  # by replica
        self._pictures: dict[int | None, dict[str, Any]] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self._gaps: Counter[int] = Counter()
        self._ttfts: dict[str, float] = {}  # by request, whose samples may begin together
        self._rejected: Counter[str] = Counter()

    def put_state(self, state: EngineState, detail: str, replica: int | None = None) -> None:
        super().put_state(state, detail, replica)
        if state is EngineState.READY:
            self._events[-1] |= {"about": self._about()}

    def put_snapshot(
        self, step_id: int, snapshot: dict[str, Any], replica: int | None = None
    ) -> None:
        if "rows" in snapshot:
            rows, preempted = snapshot["rows"], snapshot["preempted"]
            looks = self._snapshots.setdefault(replica, deque(maxlen=_MOST))
            looks.append({"step_id": step_id, "rows": rows, "preempted": preempted})
        if "pool" in snapshot:  # of pictures the last one is enough
            picture = {"pool": snapshot["pool"], "prefixes": snapshot["prefixes"]}
            self._pictures[replica] = picture
        self._has_news.set()

    def put_gap(self, seconds: float) -> None:
        self._gaps[bucket_of(seconds)] += 1

    def put_first_token(self, generation: Generation) -> None:
        """Take in that the first token of any of a request's samples has come."""
        ttft = generation.stats.ttft
        if ttft is not None and len(self._ttfts) < _MOST:
            self._ttfts[generation.request.request_id] = ttft

    def put_end(self, generation: Generation, reason: str) -> None:
        figures = {name: getattr(generation.stats, name) for name in _FIGURES}
        self._ended.append({"id": generation.request.request_id, "reason": reason, **figures})
        self._has_news.set()

    def put_rejection(self, reason: str) -> None:
        self._rejected[reason] += 1
        self._has_news.set()

    def _interval(self) -> float:
        return 2.5 * super()._interval()  # a page is drawn twice a second

    def _take_news(self) -> list[dict[str, Any]]:
        """Return what is new of each replica, and of requests: with one engine, in one event."""
        news: dict[int | None, dict[str, Any]] = {}
        for event in super()._take_news():
            news[event.get("replica")] = event
        for replica, looks in self._snapshots.items():
            news.setdefault(replica, named(replica))["looks"] = list(looks)
        for replica, picture in self._pictures.items():
            news.setdefault(replica, named(replica)).update(picture)
        of_requests = {
            "ended": list(self._ended),
            "ttfts": list(self._ttfts.values()),
            "gaps": sorted(self._gaps.items()),
            "rejected": dict(self._rejected),
            "replicas": self._changed_replicas(),
        }
        of_requests = {name: each for name, each in of_requests.items() if each}
        if of_requests:
            news.setdefault(None, {}).update(of_requests)
        for each in (self._ended, self._ttfts, self._gaps, self._rejected):
            each.clear()
        self._snapshots.clear()
        self._pictures.clear()
        return list(news.values())

    def _changed_replicas(self) -> list[dict[str, Any]]:
        """Return what the replicas are like, unless it was sent already."""
        replicas = self._replicas()
        if replicas == self._shown_replicas:
            return []
        self._shown_replicas = replicas
        return replicas

    def _steps_event(self, steps: Sequence[StepStats]) -> dict[str, Any]:
        """Return columns, and the whole record of the last step: a fifth of the size of all
        records."""
        values = zip(*map(_values_of_step, steps), strict=True)
        columns = dict(zip(_OF_EACH_STEP, values, strict=True))
        return {"steps": columns, "last": steps[-1].as_json()}


@lru_cache(64)  # samples of a batch get their tokens at the same times
def bucket_of(seconds: float) -> int:
    """Return the bucket of a gap between tokens: from ``1 µs x 2^(bucket / 8)`` on, up to the
    next."""
    return int(_GAPS_PER_OCTAVE * math.log2(max(seconds * 1e6, 1.0)))


def about_engine(engine: EngineClient, model: str) -> dict[str, Any]:
    """Return facts about the engine that do not change: its limits, the pool, and its device's
    memory."""
    facts = engine.facts
    return {
        "model": model,
        "device": facts.info.get("device"),
        "num_blocks": facts.num_blocks,
        "block_size": facts.block_size,
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "num_restarts": engine.num_restarts,
        **_of_device(facts),
    }


def _of_device(facts: EngineFacts) -> dict[str, Any]:
    """Return the memory and the price of the engine's device, as far as they are known."""
    memory = facts.info.get("memory")
    try:
        device = device_of_engine(str(facts.runs_as.get("device")))
    except ConfigError:  # its ceilings have not been measured yet
        device = None
    if memory is None and facts.rank_model.get("matrices"):
        per_token = rank_model_of_json(facts.rank_model).kv_bytes_per_token
        kv_bytes = per_token * facts.num_ranks * facts.num_blocks * facts.block_size
        weights = {"name": "weights", "bytes": facts.info["weights_bytes"], "known": "counted"}
        total = device.memory_bytes if device else None
        memory = {"total_bytes": total, "kv_bytes": kv_bytes, "lines": [weights]}
    return {"memory": memory, "usd_per_hour": device.usd_per_hour if device else None}
