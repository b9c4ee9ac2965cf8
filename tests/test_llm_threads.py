"""One `LLM` in many threads: each gets its own answers, in batches of all."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import EngineError, InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Prompts of several blocks, of which some begin alike: what is computed wrongly would be found
# again in the prefix cache.
PROMPTS = [f"{shared * 40} and then {number}" for shared in "abc" for number in range(8)]


@pytest.fixture
def llm(tiny_model):
    with LLM(str(tiny_model), num_blocks=512, max_model_len=200, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Of each prompt, what is said to it alone, from nothing that was computed before."""
    with LLM(
        str(tiny_model), num_blocks=64, max_model_len=200, threads=1, enable_prefix_caching=False
    ) as llm:
        return {prompt: tokens(llm.generate(prompt, GREEDY))[0] for prompt in PROMPTS}


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def in_threads(count, work):
    """What ``work`` returns for each number, all at once; raises what any of them raises."""
    ready = threading.Barrier(count)

    def run(number):
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [each.result(60) for each in [pool.submit(run, n) for n in range(count)]]


def wait_for_another(llm):
    """Return when a thread waits beside the one that leads."""
    deadline = time.monotonic() + 60
    while not llm._shared_loop._waiting and time.monotonic() < deadline:
        time.sleep(0.001)


def assert_clean(llm, alone):
    engine = llm._text_engine
    assert not engine.has_unfinished_requests and not engine.groups and not llm._inboxes
    assert engine.engine.scheduler.block_manager.num_used_blocks == 0
    engine.engine.check_integrity()
    assert tokens(llm.generate(list(alone), GREEDY)) == list(alone.values())


def test_eight_threads_get_what_each_would_get_alone(llm, alone):
    def work(number):
        answers = []
        for turn in range(3):
            chosen = [PROMPTS[(7 * number + 3 * turn + i) % len(PROMPTS)] for i in range(3)]
            answers += zip(chosen, tokens(llm.generate(chosen, GREEDY)), strict=True)
        return answers

    for answers in in_threads(8, work):
        assert answers == [(prompt, alone[prompt]) for prompt, _ in answers]
    assert_clean(llm, alone)


def test_threads_share_batches(llm, alone):
    """One thread steps, and the requests of the others are in its batches."""
    executor = llm._text_engine.engine.executor
    sizes = []
    submit = executor.submit

    def watched(batch):
        sizes.append(batch.num_seqs)
        time.sleep(0.002)
        return submit(batch)

    executor.submit = watched
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    outputs = in_threads(4, lambda number: llm.generate(PROMPTS[number], params))
    executor.submit = submit
    assert [each[0].outputs[0].token_ids[:8] for each in outputs] == [
        alone[prompt] for prompt in PROMPTS[:4]
    ]
    assert max(sizes) == 4 and len(sizes) < 4 * 30


def test_streams_beside_calls(llm, alone):
    def work(number):
        prompt = PROMPTS[number]
        if number % 2:
            return prompt, tokens(llm.generate(prompt, GREEDY))[0]
        chunks = list(llm.stream(prompt, GREEDY))
        assert chunks[-1].finish_reason == "length"
        assert chunks[-1].output.outputs[0].text == "".join(chunk.text for chunk in chunks)
        return prompt, [token_id for chunk in chunks for token_id in chunk.token_ids]

    for prompt, answer in in_threads(8, work):
        assert answer == alone[prompt]
    assert_clean(llm, alone)


def test_chats_and_samples_beside_each_other(llm, alone):
    conversation = [{"role": "user", "content": "Hi"}]
    several = SamplingParams(n=3, temperature=1.2, seed=7, max_tokens=8, ignore_eos=True)
    expected = [
        tokens(llm.chat(conversation, GREEDY)),
        [one.token_ids for one in llm.generate(PROMPTS[0], several)[0].outputs],
    ]

    def work(number):
        if number % 2:
            return [one.token_ids for one in llm.generate(PROMPTS[0], several)[0].outputs]
        return tokens(llm.chat(conversation, GREEDY))

    answers = in_threads(8, work)
    assert all(answer == expected[number % 2] for number, answer in enumerate(answers))
    assert_clean(llm, alone)


@pytest.mark.parametrize("ending", ["closed", "forgotten", "raised"])
def test_streams_that_are_left_end_nobody_elses(llm, alone, ending):
    def leave_early(prompt):
        stream = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        first = next(stream).token_ids
        if ending == "closed":
            stream.close()
        if ending == "raised":
            raise ZeroDivisionError
        return first == alone[prompt][: len(first)]

    def work(number):
        prompt = PROMPTS[number]
        if number % 2:
            return tokens(llm.generate([prompt, PROMPTS[-1 - number]], GREEDY)) == [
                alone[prompt],
                alone[PROMPTS[-1 - number]],
            ]
        try:
            return leave_early(prompt)
        except ZeroDivisionError:
            return True

    assert all(in_threads(8, work))
    llm.generate(PROMPTS[0], GREEDY)  # what was forgotten ends with the next step
    assert_clean(llm, alone)


def test_a_mistake_in_one_thread_is_its_own(llm, alone):
    def work(number):
        if number % 2:
            with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
                llm.generate([10**6], GREEDY)
            return True
        (bad, good) = llm.generate([[10**6], PROMPTS[number]], GREEDY)
        return "outside" in bad.error and good.outputs[0].token_ids == alone[PROMPTS[number]]

    assert all(in_threads(8, work))
    assert_clean(llm, alone)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_when_the_thread_that_drives_is_interrupted_another_goes_on(llm, alone, ending):
    """What is raised in the middle of a step ends the call of that thread alone."""
    executor, submit = llm._text_engine.engine.executor, llm._text_engine.engine.executor.submit
    raised = []

    def fail_once(batch):
        if batch.num_seqs >= 2 and not raised:  # all four are rarely there on a fast machine
            raised.append(threading.get_ident())
            raise ending
        if not raised:  # on a busy one, each would come when the one before it has its answer
            wait_for_another(llm)
        return submit(batch)

    step = llm._text_engine.step

    def step_or_fail():
        if ending is RuntimeError and len(llm._inboxes) >= 2 and not raised:
            raised.append(threading.get_ident())
            raise ending
        return step()

    executor.submit, llm._text_engine.step = fail_once, step_or_fail
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)

    def work(number):
        try:
            return llm.generate(PROMPTS[number], params)[0].outputs[0].token_ids[:8]
        except ending:
            return threading.get_ident()

    answers = in_threads(4, work)
    executor.submit, llm._text_engine.step = submit, step
    assert len(raised) == 1
    for number, answer in enumerate(answers):
        assert answer in (alone[PROMPTS[number]], raised[0])
    assert sum(answer == raised[0] for answer in answers) == 1
    assert_clean(llm, alone)


def test_who_closes_it_leaves_nobody_waiting(tiny_model):
    llm = LLM(str(tiny_model), num_blocks=512, max_model_len=200, threads=1)
    endless = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
    begun = threading.Barrier(5)
    submit = llm._text_engine.engine.executor.submit
    llm._text_engine.engine.executor.submit = lambda batch: (time.sleep(0.005), submit(batch))[1]

    def work(number):
        if number == 4:
            begun.wait()
            time.sleep(0.05)
            llm.close()
            llm.close()
            return True
        stream = llm.stream("abc", endless)
        next(stream)
        begun.wait()
        with pytest.raises(EngineError, match="closed"):
            if number % 2:
                list(stream)
            else:
                llm.generate(["abc", "xyz"], endless)
        return True

    assert all(in_threads(5, work))
    for call in (lambda: llm.generate("abc"), lambda: llm.stream("abc")):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_more_prompts_of_more_threads_than_the_queue_holds(tiny_model, alone):
    with LLM(
        str(tiny_model), num_blocks=512, max_queued_requests=2, max_num_seqs=2, threads=1
    ) as llm:
        answers = in_threads(4, lambda number: tokens(llm.generate(PROMPTS[number::4], GREEDY)))
        for number, answer in enumerate(answers):
            assert answer == [alone[prompt] for prompt in PROMPTS[number::4]]
        assert_clean(llm, alone)


def test_a_stream_may_be_read_by_two_threads(llm, alone):
    stream = llm.stream(PROMPTS[0], GREEDY)
    parts = in_threads(2, lambda number: [(chunk.output, chunk.token_ids) for chunk in stream])
    chunks = sorted(sum(parts, []), key=lambda chunk: len(chunk[0].outputs[0].token_ids))
    assert [token_id for _, ids in chunks for token_id in ids] == alone[PROMPTS[0]]
    assert_clean(llm, alone)


def test_params_that_are_changed_meanwhile_change_nothing(llm, alone):
    params = GREEDY.clone()
    stream = llm.stream(PROMPTS[0], params)
    next(stream)
    params.max_tokens = 2
    params.temperature = 1.5
    assert len(list(stream)[-1].output.outputs[0].token_ids) == 8


def test_a_finalizer_in_a_step_cannot_wait_for_another_and_is_told(llm):
    executor, submit = llm._text_engine.engine.executor, llm._text_engine.engine.executor.submit
    said = []

    def generate_again(batch):
        if not said:
            said.append(None)
            try:
                llm.generate("abc", GREEDY)
            except EngineError as error:
                said[0] = str(error)
        return submit(batch)

    executor.submit = generate_again
    assert len(tokens(llm.generate("abc", GREEDY))[0]) == 8
    executor.submit = submit
    assert "in the middle of a step" in said[0]
