from __future__ import annotations

from octavo.core.limits import QueueLimits
from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import EngineObserver, Generation, GenerationRequest
from octavo.server.engine.waiting_queue import PendingGeneration, QueuedWork, WaitingQueue


def entry(tenant: str, num_prompt: int, **params) -> PendingGeneration:
    request = GenerationRequest("r", [1] * num_prompt, SamplingParams(**params), 0.0, tenant=tenant)
    return PendingGeneration(Generation(request, lambda one: None), b"")


def test_nobody_waits_for_more_of_others_than_for_what_it_gets_itself():
    queue = WaitingQueue(QueueLimits(), EngineObserver())
    for _ in range(10):
        queue.add(entry("flood", 100))
    assert queue.work_before("flood", 100)[:2] == (10, 1000)
    assert queue.work_before("other", 100)[:2] == (1, 100)
    mine = entry("other", 200, n=2)
    queue.add(mine)
    assert queue.work_before("other", 100)[:2] == (2 + 3, 200 + 300)
    queue.note_started(mine, 0.0)
    assert queue.work_before("other", 10_000)[:2] == (10, 1000)


def test_all_that_enters_leaves():
    queue = WaitingQueue(QueueLimits(2, 100), EngineObserver(), max_work=100)
    for _ in range(3):
        one, two = entry("a", 10, n=2, max_tokens=5), entry("b", 1, max_tokens=1)
        queue.add(one)
        queue.add(two)
        queue.note_started(two, 0.0)
        queue.requeue(two)
        queue.remove(one)
        queue.note_started(two, 0.0)
        queue.remove(two)
    assert queue.work_before("a", 1) == QueuedWork(0, 0, 0)
