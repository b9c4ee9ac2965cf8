from __future__ import annotations

import pytest
from faults import every, sometimes
from hash_model import HashExecutor

from octavo.core.batch import DAMAGED, Batch, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.executor import faulty
from octavo.executor.faulty import FaultyExecutor


def batch_of(*prompts: list[int]) -> Batch:
    items = []
    for number, prompt in enumerate(prompts):
        request = Request(f"r{number}", prompt, SamplingParams(), 0.0)
        request.block_ids = [number]
        items.append(ScheduledRequest(request, 0, len(prompt), 1))
    return Batch(0, tuple(items))


def test_every_and_sometimes():
    third = every(3)
    assert [third() for _ in range(6)] == [False, False, True] * 2
    first, again = sometimes(0.5, 7), sometimes(0.5, 7)
    drawn = [first() for _ in range(200)]
    assert drawn == [again() for _ in range(200)] and 60 < sum(drawn) < 140


def test_only_batches_with_the_poison_suffer():
    executor = FaultyExecutor(HashExecutor(4, 4), {"raise": 9})
    healthy = executor.submit(batch_of([1, 2], [3])).result()
    assert healthy.token_ids == HashExecutor(4, 4).submit(batch_of([1, 2], [3])).result().token_ids
    with pytest.raises(RuntimeError, match="poisoned"):
        executor.submit(batch_of([1, 2], [9]))
    assert executor.kv_capacity() == 4 and executor.depth == 1
    executor.close()


@pytest.mark.parametrize("kind", ["exit", "kill", "hang", "slow"])
def test_every_fault_has_its_token(kind, monkeypatch):
    seen = []
    monkeypatch.setattr(faulty, "_misbehave", seen.append)
    executor = FaultyExecutor(HashExecutor(4, 4), {kind: 9})
    executor.submit(batch_of([9]))
    assert seen == [kind]


def test_a_damaged_row_is_damaged_alone():
    executor = FaultyExecutor(HashExecutor(4, 4), {"nan": 9})
    output = executor.submit(batch_of([1, 2], [9])).result()
    assert list(output.token_ids) == ["r0"] and output.errors == {"r1": DAMAGED}


def test_unknown_faults_are_refused():
    with pytest.raises(ValueError, match="explode"):
        FaultyExecutor(HashExecutor(4, 4), {"explode": 1})
