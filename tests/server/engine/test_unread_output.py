"""Answers that clients have not read yet: merged, counted, and bounded."""

from __future__ import annotations

import asyncio

import pytest

from octavo.base.errors import QueueFullError
from octavo.core.batch import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import Generation, GenerationRequest
from octavo.server.engine.unread_output import UnreadOutputMemory, bytes_of
from octavo.serving.outputs import Delta


def generation(memory: UnreadOutputMemory, *, n: int = 1, streams: bool = False):
    request = GenerationRequest(
        "r", [1], SamplingParams(n=n, max_tokens=10_000), 0.0, streams=streams
    )
    aborted: list[Generation] = []
    return Generation(request, aborted.append, memory), aborted


def push(one: Generation, count: int, n: int = 1, reason: str | None = None) -> None:
    for number in range(count):
        end = reason if number == count - 1 else None
        one.push([Delta(index, f"{number},", [number], [], end) for index in range(n)])


def test_a_long_answer_is_kept_as_one_piece_of_each_sample():
    memory = UnreadOutputMemory()
    one, _ = generation(memory, n=2)
    push(one, 3000, 2, "length")
    assert len(one._deltas) < 600
    whole = asyncio.run(one.collect())
    assert [each.token_ids for each in whole] == [list(range(3000))] * 2
    assert whole[0].text == "".join(f"{number}," for number in range(3000))
    assert [each.finish_reason for each in whole] == ["length"] * 2
    assert memory.num_bytes == bytes_of(6000, 2 * len(whole[0].text))
    one.close()
    assert memory.num_bytes == 0


def test_a_stream_that_is_behind_gets_all_in_larger_pieces():
    async def read() -> None:
        memory = UnreadOutputMemory()
        one, _ = generation(memory, streams=True)
        push(one, 2000)
        ids = [token for delta in await anext(one) for token in delta.token_ids]
        assert ids == list(range(2000)) and memory.num_bytes == 0
        push(one, 3, reason="stop")
        assert [delta.token_ids for delta in await anext(one)] == [[0], [1], [2]]
        with pytest.raises(StopAsyncIteration):
            await anext(one)

    asyncio.run(read())


def test_log_probabilities_and_prompts_count():
    memory = UnreadOutputMemory()
    one, _ = generation(memory)
    entry = TokenLogprobs(1, -0.5, 1, tuple((token, -1.0) for token in range(20)))
    one.push([Delta(0, "x", [1], [entry])])
    of_one = memory.num_bytes
    assert of_one > 2000
    one.push_prompt_logprobs([entry] * 10)
    assert memory.num_bytes > 10 * of_one
    one.restart()
    assert memory.num_bytes == 0


@pytest.mark.parametrize("is_over", [False, True])
def test_who_holds_the_most_gives_it_up(is_over):
    memory = UnreadOutputMemory(10_000)
    (small, small_aborted), (large, large_aborted) = generation(memory), generation(memory)
    push(small, 10)
    push(large, 300, reason="stop" if is_over else None)
    memory.keep_within()
    assert large_aborted == ([] if is_over else [large]) and not small_aborted
    assert 0 < memory.num_bytes < 1000
    with pytest.raises(QueueFullError, match="ask for fewer"):
        asyncio.run(large.collect())
    push(large, 5)  # of a step that was under way
    assert memory.num_bytes < 1000
    push(small, 1, reason="stop")
    assert len(asyncio.run(small.collect())[0].token_ids) == 11


def test_records_are_given_up_before_answers():
    memory = UnreadOutputMemory(10_000)
    one, aborted = generation(memory, streams=True)
    whole: list[list[Delta]] = []
    one.record(lambda _, deltas: whole.append(deltas))
    push(one, 100)
    memory.keep_within()
    push(one, 1, reason="stop")
    assert not whole and not aborted
    assert len(asyncio.run(one.collect())[0].token_ids) == 101
    one.close()
    assert memory.num_bytes == 0


def test_a_record_has_a_bound_of_its_own():
    memory = UnreadOutputMemory()
    for max_bytes, count in ((100, 0), (10_000, 1)):
        one, _ = generation(memory)
        whole: list[list[Delta]] = []
        one.record(lambda _, deltas, whole=whole: whole.append(deltas), max_bytes)
        push(one, 20, reason="stop")
        assert len(whole) == count
        one.close()
    assert memory.num_bytes == 0
