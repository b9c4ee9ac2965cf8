from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from hash_model import expected_tokens

from octavo import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    RequestOutputKind,
    SamplingParams,
    async_llm,
)
from octavo.base.errors import EngineError, InvalidRequestError, QueueFullError
from octavo.serving.output_builder import OutputBuilder

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# With native kernels, 150 tokens of the tiny model would be over before they can be cancelled.
SLOW = {"kernels": "reference"}
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model):
    args = AsyncEngineArgs(model=str(tiny_model), num_blocks=128, max_model_len=200, **SLOW)
    engine = AsyncLLMEngine.from_engine_args(args)
    yield engine
    engine.shutdown()
    engine.shutdown()


class Panic(BaseException):
    """What a library in Rust raises when it panics: no Exception."""


@pytest.fixture
def start(hash_engine, monkeypatch):
    """Starts an engine over the hash model; keyword arguments are the scheduler's."""
    started = []

    def start_one(**limits):
        loaded = SimpleNamespace(text_engine=hash_engine(**limits), config=None, info={})
        monkeypatch.setattr(async_llm, "load_engine", lambda args, is_served: loaded)
        started.append(AsyncLLMEngine("hash"))
        return started[-1]

    yield start_one
    for engine in started:
        engine.shutdown()


def tokens(count, **fields):
    return SamplingParams(max_tokens=count, ignore_eos=True, **fields)


def used_blocks(engine: AsyncLLMEngine) -> int:
    return engine._loaded.text_engine.engine.scheduler.block_manager.num_used_blocks


async def collect(engine, prompt, params, request_id):
    outputs = [output async for output in engine.generate(prompt, params, request_id=request_id)]
    return outputs


async def until(condition) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def test_many_at_once_get_their_own_answers(engine, tiny_model):
    prompts = [f"prompt number {i}" for i in range(12)]

    async def main():
        return await asyncio.gather(
            *(collect(engine, prompt, GREEDY, f"r{i}") for i, prompt in enumerate(prompts))
        )

    answers = asyncio.run(main())
    with LLM(str(tiny_model), num_blocks=128, **SLOW) as llm:
        expected = llm.generate(prompts, GREEDY)
    for outputs, wanted in zip(answers, expected, strict=True):
        assert outputs[-1].outputs[0].token_ids == wanted.outputs[0].token_ids
        assert outputs[-1].finished and not any(output.finished for output in outputs[:-1])
        texts = [output.outputs[0].text for output in outputs]
        assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))


def test_leaving_early_aborts(engine):
    async def main():
        async for output in engine.generate("abc", LONG, request_id="left"):
            if len(output.outputs[0].token_ids) >= 2:
                break
        await until(lambda: used_blocks(engine) == 0)

    asyncio.run(main())
    assert "left" not in engine._mailboxes


def test_a_cancelled_task_aborts(engine):
    async def main():
        task = asyncio.create_task(collect(engine, "abc", LONG, "cancelled"))
        await until(lambda: used_blocks(engine) > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: used_blocks(engine) == 0)

    asyncio.run(main())


def test_abort_from_outside_ends_the_stream(engine):
    async def main():
        task = asyncio.create_task(collect(engine, "abc", LONG, "aborted"))
        await until(lambda: used_blocks(engine) > 0)
        await engine.abort("aborted")
        await engine.abort("aborted")
        await engine.abort("never there")
        return await task

    outputs = asyncio.run(main())
    assert outputs[-1].outputs[0].finish_reason == "abort"


def test_bad_requests_fail_alone(engine):
    async def main():
        good = asyncio.create_task(collect(engine, "good", GREEDY, "good"))
        for prompt in ("", [999]):
            with pytest.raises(InvalidRequestError):
                await collect(engine, prompt, GREEDY, "bad")
        return await good

    assert asyncio.run(main())[-1].outputs[0].finish_reason == "length"


def test_an_id_in_use_is_refused_and_free_again_afterwards(engine):
    async def main():
        first = asyncio.create_task(collect(engine, "abc", LONG, "same"))
        await asyncio.sleep(0)
        await until(lambda: "same" in engine._mailboxes)
        with pytest.raises(InvalidRequestError, match="in use"):
            await collect(engine, "abc", GREEDY, "same")
        await first
        return await collect(engine, "abc", GREEDY, "same")

    assert asyncio.run(main())[-1].finished


def test_a_request_that_raises_tells_its_caller(engine, monkeypatch):
    executor = engine._loaded.text_engine.engine.executor

    async def main():
        monkeypatch.setattr(executor, "submit", lambda batch: 1 / 0)
        unlucky = (await collect(engine, "abc", GREEDY, "unlucky"))[-1]
        assert unlucky.outputs[0].finish_reason == "error" and "ZeroDivision" in unlucky.error
        monkeypatch.undo()
        return await collect(engine, "abc", GREEDY, "lucky")

    assert asyncio.run(main())[-1].finished


def test_shutdown_tells_those_who_wait(tiny_model):
    async def main():
        engine = AsyncLLMEngine(str(tiny_model), num_blocks=64, **SLOW)
        task = asyncio.create_task(collect(engine, "abc", LONG, "r"))
        await until(lambda: used_blocks(engine) > 0)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineError, match="shut down"):
            await task
        with pytest.raises(EngineError, match="shut down"):
            await collect(engine, "abc", GREEDY, "late")

    asyncio.run(main())


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_a_bug_of_ours_leaves_nobody_waiting(start, error):
    def fail():
        raise error

    async def main():
        engine = start()
        engine._text_engine.step = fail
        with pytest.raises(EngineError, match=error.__name__):
            await collect(engine, [1], GREEDY, "r")
        with pytest.raises(EngineError, match="shut down"):
            await collect(engine, [1], GREEDY, "late")

    asyncio.run(main())


# -- slow readers ------------------------------------------------------------------------------


def test_a_slow_reader_gets_the_latest_state_once(start):
    engine = start()

    async def main():
        answer = engine.generate([1, 2], tokens(200), request_id="r")
        first = await anext(answer)
        await until(lambda: not engine._text_engine.has_unfinished_requests)
        assert len(first.outputs[0].token_ids) < 200  # what was read does not change
        return [output async for output in answer]

    (last,) = asyncio.run(main())
    assert last.finished and last.outputs[0].token_ids == expected_tokens([1, 2], 200, 97)


def test_an_event_loop_that_is_busy_is_woken_once(start, monkeypatch):
    """And outputs are put together by who reads them, so that a step costs what is new in it."""
    engine = start()
    wakes, threads = [], set()
    wake, output = async_llm.wake, OutputBuilder.output
    monkeypatch.setattr(async_llm, "wake", lambda *args: (wakes.append(args), wake(*args))[1])

    def output_here(*args):
        threads.add(threading.get_ident())
        return output(*args)

    monkeypatch.setattr(OutputBuilder, "output", output_here)

    async def main():
        task = asyncio.create_task(collect(engine, [1, 2], tokens(200), "r"))
        while not wakes:
            await asyncio.sleep(0.001)
        num_wakes = len(wakes)
        while engine._text_engine.has_unfinished_requests:
            time.sleep(0.001)  # not asyncio's
        assert len(wakes) <= num_wakes + 1
        return await task

    assert asyncio.run(main())[-1].finished
    assert threads == {threading.get_ident()}


def test_logprobs_and_samples_add_up_however_they_are_read(engine):
    params = SamplingParams(
        n=2, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=0
    )
    *before, last = asyncio.run(collect(engine, "abc", params, "r"))
    for completion in last.outputs:
        assert len(completion.logprobs) == len(completion.token_ids) == 12
        pairs = zip(completion.logprobs, completion.token_ids, strict=True)
        total = sum(position[token_id].logprob for position, token_id in pairs)
        assert completion.cumulative_logprob == pytest.approx(total)
    assert [entry and len(entry) for entry in last.prompt_logprobs] == [None, 1, 1]
    for output in before:
        for completion, whole in zip(output.outputs, last.outputs, strict=True):
            length = len(completion.token_ids)
            assert completion.token_ids == whole.token_ids[:length]
            assert completion.logprobs == whole.logprobs[:length]


def test_deltas_are_what_is_new_and_add_up(engine):
    asked = {
        "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True,
        "logprobs": 1, "prompt_logprobs": 0,
    }  # fmt: skip
    kinds = RequestOutputKind
    whole = asyncio.run(collect(engine, "abc", SamplingParams(**asked), "r"))[-1]
    delta = SamplingParams(**asked, output_kind=kinds.DELTA)
    outputs = asyncio.run(collect(engine, "abc", delta, "r"))
    assert len(outputs) > 2 and [output.finished for output in outputs].count(True) == 1
    for completion in whole.outputs:
        parts = [
            part for output in outputs for part in output.outputs if part.index == completion.index
        ]
        assert "".join(part.text for part in parts) == completion.text
        assert sum([part.token_ids for part in parts], []) == completion.token_ids
        assert sum([part.logprobs for part in parts], []) == completion.logprobs
        assert parts[-1].cumulative_logprob == pytest.approx(completion.cumulative_logprob)
        assert [part.finished() for part in parts] == [False] * (len(parts) - 1) + [True]
    assert sum([output.prompt_logprobs for output in outputs], []) == whole.prompt_logprobs
    final = SamplingParams(**asked, output_kind=kinds.FINAL_ONLY)
    (last,) = asyncio.run(collect(engine, "abc", final, "r"))
    assert last.outputs == whole.outputs and last.finished


def test_a_delta_costs_the_same_however_long_the_answer_is(start, monkeypatch):
    """Counted: the tokens that outputs hold, of which a reader who keeps up gets each once."""
    engine = start()
    # The engine is at most four steps ahead of its reader, who would otherwise get the whole
    # answer as one output where the machine gives the reader no time.
    ahead = threading.Semaphore(0)
    step = engine._text_engine.step

    def step_when_read():
        ahead.acquire(timeout=1)
        return step()

    monkeypatch.setattr(engine._text_engine, "step", step_when_read)

    async def held(kind, count):
        params = SamplingParams(temperature=0.0, max_tokens=count, output_kind=kind)
        parts = []
        ahead.release(4 if kind != RequestOutputKind.FINAL_ONLY else count + 4)
        async for output in engine.generate([1, 2], params, request_id="r"):
            ahead.release()
            parts.extend(len(part.token_ids) for part in output.outputs)
        return parts

    delta = asyncio.run(held(RequestOutputKind.DELTA, 200))
    assert sum(delta) == 200
    assert sum(asyncio.run(held(RequestOutputKind.CUMULATIVE, 200))) > 200
    assert asyncio.run(held(RequestOutputKind.FINAL_ONLY, 200)) == [200]


def test_an_answer_to_a_slow_reader_of_deltas_loses_nothing(start):
    engine = start()

    async def main():
        params = tokens(200).with_changes(output_kind=RequestOutputKind.DELTA)
        answer = engine.generate([1, 2], params, request_id="r")
        parts = [await anext(answer)]
        await until(lambda: not engine._text_engine.has_unfinished_requests)
        return parts + [output async for output in answer]

    first, last = asyncio.run(main())
    assert first.outputs[0].token_ids + last.outputs[0].token_ids == expected_tokens(
        [1, 2], 200, 97
    )


def test_an_abort_of_deltas_is_said_once(engine):
    async def main():
        params = LONG.with_changes(output_kind=RequestOutputKind.DELTA)
        task = asyncio.create_task(collect(engine, "abc", params, "aborted"))
        await until(lambda: used_blocks(engine) > 0)
        await engine.abort("aborted")
        return await task

    outputs = asyncio.run(main())
    assert [o.outputs[0].finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["abort"]


def test_the_best_of_several_cannot_be_told_in_deltas(engine):
    params = SamplingParams(best_of=2, output_kind=RequestOutputKind.DELTA)
    with pytest.raises(InvalidRequestError, match="best_of"):
        asyncio.run(collect(engine, "abc", params, "r"))


def test_chats_have_the_arguments_of_the_offline_api(engine, tiny_model):
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"chat_template": "{{ mood }}", "chat_template_kwargs": {"mood": "glad"}}

    async def answer(**arguments):
        return [o async for o in engine.chat(messages, GREEDY, "c", **arguments)][-1]

    output = asyncio.run(answer(**asked))
    assert output.prompt == "glad" and len(output.outputs[0].token_ids) > 0
    assert asyncio.run(answer()).prompt == "<|user|>Hi<eos><|assistant|>"
    with pytest.raises(TypeError, match="add_genration_prompt"):
        asyncio.run(answer(add_genration_prompt=False))


@pytest.mark.parametrize("argument", ["trace_headers", "tokenization_kwargs", "data_parallel_rank"])
def test_what_only_vllm_has_is_refused_by_name_and_none_is_taken(engine, argument):
    with pytest.raises(InvalidRequestError, match=f"{argument}: is not supported: "):
        engine.generate("abc", GREEDY, "r", **{argument: {"x": 1}})
    assert engine.generate("abc", GREEDY, "r", **{argument: None})


# -- beside the engine's thread ----------------------------------------------------------------


def test_an_abort_while_the_prompt_is_tokenized_is_not_lost(start, monkeypatch):
    engine = start()
    entered, released = threading.Event(), threading.Event()
    tokenize = engine._text_engine.tokenize

    def slow(prompt):
        entered.set()
        assert released.wait(10)
        return tokenize(prompt)

    monkeypatch.setattr(engine._text_engine, "tokenize", slow)

    async def main():
        task = asyncio.create_task(collect(engine, [1, 2], tokens(200), "r"))
        await asyncio.to_thread(entered.wait, 10)
        await engine.abort("r")
        released.set()
        return await task

    (output,) = asyncio.run(main())
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert not engine._text_engine.has_unfinished_requests and not engine._mailboxes


def test_bad_words_are_not_tokenized_between_steps(start, monkeypatch):
    engine = start()
    tokenizer = engine.get_tokenizer()
    threads, encode = set(), type(tokenizer).encode

    def encode_here(self, *args, **options):
        threads.add(threading.current_thread().name)
        return encode(self, *args, **options)

    monkeypatch.setattr(type(tokenizer), "encode", encode_here)
    params = tokens(3, bad_words=["no", "never"])
    assert asyncio.run(collect(engine, [1], params, "r"))[-1].finished
    assert threads and "octavo-engine" not in threads


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_a_tokenizer_that_gives_up_is_one_callers_trouble(start, monkeypatch, error):
    engine = start()
    tokenize = engine._text_engine.tokenize

    def fail(prompt):
        if prompt == [1]:
            raise error("as asked")
        return tokenize(prompt)

    monkeypatch.setattr(engine._text_engine, "tokenize", fail)

    async def main():
        good = asyncio.create_task(collect(engine, [2], tokens(50), "good"))
        with pytest.raises(InvalidRequestError, match="cannot be tokenized"):
            await collect(engine, [1], tokens(3), "bad")
        return await good

    assert asyncio.run(main())[-1].finished


def test_a_full_queue_is_told_to_its_caller(start):
    engine = start(max_num_seqs=1, max_queued_requests=1)
    held = threading.Event()

    async def main():
        engine._engine_loop.tell(held.wait)
        tasks = [asyncio.create_task(collect(engine, [i], tokens(3), f"r{i}")) for i in range(1, 4)]
        await asyncio.sleep(0.05)
        held.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(main())
    refused = [one for one in answers if isinstance(one, QueueFullError)]
    assert len(refused) == 2 and sum(isinstance(one, list) for one in answers) == 1


def test_an_event_loop_that_was_closed_has_nobody_who_waits(start):
    engine = start()
    loop = asyncio.new_event_loop()
    answer = engine.generate([1, 2], tokens(200), request_id="left")
    submit, steps = engine._text_engine.engine.executor.submit, []

    def slow(batch):
        time.sleep(0.002)
        steps.append(batch)
        return submit(batch)

    engine._text_engine.engine.executor.submit = slow
    loop.run_until_complete(anext(answer))
    loop.close()
    while engine._text_engine.has_unfinished_requests:
        time.sleep(0.001)
    assert len(steps) < 100
    assert asyncio.run(collect(engine, [1], tokens(3), "next"))[-1].finished
