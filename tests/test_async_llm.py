from __future__ import annotations

import asyncio

import pytest

from octavo import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from octavo.errors import EngineError, InvalidRequestError

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
    runner = engine._loaded.text_engine.engine.executor.runner

    async def main():
        monkeypatch.setattr(runner, "run", lambda batch: 1 / 0)
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


def test_a_bug_of_ours_leaves_nobody_waiting(tiny_model, monkeypatch):
    async def main():
        engine = AsyncLLMEngine(str(tiny_model), num_blocks=64, **SLOW)
        monkeypatch.setattr(engine._loaded.text_engine, "step", lambda: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await collect(engine, "abc", GREEDY, "r")
        with pytest.raises(EngineError, match="shut down"):
            await collect(engine, "abc", GREEDY, "late")
        engine.shutdown()

    asyncio.run(main())
