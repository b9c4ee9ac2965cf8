from __future__ import annotations

from octavo.core.limits import QueueLimits
from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import EngineObserver, Generation, GenerationRequest
from octavo.server.engine.waiting_queue import Entry, Waiting, WaitingQueue


def entry(tenant: str, num_prompt: int, **params) -> Entry:
    request = GenerationRequest("r", [1] * num_prompt, SamplingParams(**params), 0.0, tenant=tenant)
    return Entry(Generation(request, lambda one: None), b"")


def test_nobody_waits_for_more_of_others_than_for_what_it_gets_itself():
    room = WaitingQueue(QueueLimits(), EngineObserver())
    for _ in range(10):
        room.enter(entry("flood", 100))
    assert room.waiting_before("flood", 100)[:2] == (10, 1000)
    assert room.waiting_before("other", 100)[:2] == (1, 100)
    mine = entry("other", 200, n=2)
    room.enter(mine)
    assert room.waiting_before("other", 100)[:2] == (2 + 3, 200 + 300)
    room.begin(mine, 0.0)
    assert room.waiting_before("other", 10_000)[:2] == (10, 1000)


def test_all_that_enters_leaves():
    room = WaitingQueue(QueueLimits(2, 100), EngineObserver(), max_work=100)
    for _ in range(3):
        one, two = entry("a", 10, n=2, max_tokens=5), entry("b", 1, max_tokens=1)
        room.enter(one)
        room.enter(two)
        room.begin(two, 0.0)
        room.come_back(two)
        room.leave(one)
        room.begin(two, 0.0)
        room.leave(two)
    assert room.waiting_before("a", 1) == Waiting(0, 0, 0)
