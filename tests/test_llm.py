from __future__ import annotations

import inspect
import shutil

import numpy as np
import pytest

from octavo import LLM, RequestOutputKind, SamplingParams
from octavo.base.errors import (
    ConfigError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    PromptTooLongError,
)
from octavo.kernels.cpu import library

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), num_blocks=64, max_model_len=200) as llm:
        yield llm


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["one", "two two two", "three"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 8 and output.finished
        assert output.metrics.ttft > 0 and output.metrics.tpot > 0


def test_params_for_each_prompt(llm):
    params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequestError, match="2 sampling params for 1 prompts"):
        llm.generate(["a"], params[:2])


def test_a_stream_says_what_generate_says(llm):
    whole = llm.generate("abc", GREEDY)[0].outputs[0]
    chunks = list(llm.stream("abc", GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == whole.token_ids
    assert chunks[-1].finish_reason == "length" and chunks[0].finish_reason is None
    assert chunks[-1].output.outputs[0].text == whole.text


def test_streams_may_be_interleaved(llm):
    pairs = zip(llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY), strict=True)
    first, second = zip(*pairs, strict=True)
    for prompt, chunks in (("abc", first), ("xyz", second)):
        whole = llm.generate(prompt, GREEDY)[0].outputs[0].text
        assert "".join(chunk.text for chunk in chunks) == whole


def test_a_stream_that_is_read_late_says_the_same(llm):
    """Its chunks were made while others drove the engine, each as things stood then."""
    late = llm.stream("abc", GREEDY)
    llm.generate("xyz", GREEDY)
    chunks = list(late)
    whole = llm.generate("abc", GREEDY)[0].outputs[0]
    assert len(chunks) > 1
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    for number, chunk in enumerate(chunks, 1):
        (completion,) = chunk.output.outputs
        so_far = [token_id for one in chunks[:number] for token_id in one.token_ids]
        assert completion.token_ids == so_far == whole.token_ids[: len(so_far)]
        assert completion.text == "".join(one.text for one in chunks[:number])
        assert chunk.output.finished == (number == len(chunks))


def test_a_stream_that_nobody_reads_is_ended_when_it_is_forgotten(llm):
    scheduler = llm._text_engine.engine.scheduler
    stream = llm.stream("abc", GREEDY)
    other = llm.stream("xyz", GREEDY)
    next(other)
    forgotten, _ = scheduler.requests
    del stream
    next(other)
    assert forgotten not in scheduler.requests and forgotten not in llm._inboxes
    del other
    assert len(llm.generate("abc", GREEDY)[0].outputs[0].token_ids) == 8
    assert not llm._text_engine.has_unfinished_requests and not llm._inboxes
    assert scheduler.block_manager.num_used_blocks == 0


def test_a_stream_may_be_closed_more_than_once_and_then_ends(llm):
    stream = llm.stream("abc", GREEDY)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert not llm._text_engine.has_unfinished_requests and not llm._inboxes


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_an_interruption_gets_through_and_leaves_nothing_behind(llm, monkeypatch, ending):
    def interrupt(batch):
        raise ending

    for run in (
        lambda: llm.generate(["abc", "xyz"], GREEDY),
        lambda: next(llm.stream("abc", GREEDY)),
    ):
        monkeypatch.setattr(llm._text_engine.engine.executor, "submit", interrupt)
        with pytest.raises(ending):
            run()
        monkeypatch.undo()
        assert not llm._text_engine.groups and not llm._inboxes
        assert llm.generate("abc", GREEDY)[0].finished
        assert llm._text_engine.engine.scheduler.block_manager.num_used_blocks == 0


def test_a_stream_that_is_left_frees_its_blocks(llm):
    stream = llm.stream("abc", GREEDY)
    next(stream)
    stream.close()
    engine = llm._text_engine.engine
    assert not engine.has_unfinished_requests and not llm._inboxes
    assert engine.scheduler.block_manager.num_used_blocks == 0


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Hi<eos>"}]
    (output,) = llm.chat(messages, GREEDY)
    # The template's own <eos> is the token 256; the user's is text.
    assert output.prompt_token_ids == [258, *llm.get_tokenizer().encode("Hi<eos>"), 256, 259]
    assert output.prompt == "<|user|>Hi<eos><eos><|assistant|>"
    several = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in several] == [output.outputs[0].token_ids] * 2
    chunks = list(llm.stream_chat(messages, GREEDY))
    assert chunks[-1].output.outputs[0].token_ids == output.outputs[0].token_ids
    assert llm.has_chat_template


HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ({"add_generation_prompt": False}, "<|user|>Hi<eos>"),
        ({"chat_template": "{{ messages[0].content }}!"}, "Hi!"),
        ({"chat_template": "{{ x }}", "chat_template_kwargs": {"x": "y"}}, "y"),
        ({"chat_template": "{{ tools[0].function.name }}", "tools": [TOOL]}, "f"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|user|>Hi"),
        (
            {
                "chat_template": "{{ messages[0].content[0].type }}",
                "chat_template_content_format": "openai",
            },
            "text",
        ),
        ({"lora_request": None, "mm_processor_kwargs": {}, "tokenization_kwargs": None}, None),
    ],
)
def test_every_argument_of_a_chat_has_its_effect(llm, arguments, prompt):
    (output,) = llm.chat(HI, GREEDY, **arguments)
    assert output.prompt == (prompt or "<|user|>Hi<eos><|assistant|>")
    streamed = {k: v for k, v in arguments.items() if prompt}
    *_, last = llm.stream_chat(HI, GREEDY, **streamed)
    assert last.output.prompt == output.prompt
    assert last.output.outputs[0].token_ids == output.outputs[0].token_ids


def test_the_arguments_of_a_chat_stand_in_vllms_order(llm):
    parameters = [*inspect.signature(llm.chat).parameters]
    assert parameters == [
        "messages", "sampling_params", "use_tqdm", "lora_request", "chat_template",
        "chat_template_content_format", "add_generation_prompt", "continue_final_message", "tools",
        "chat_template_kwargs", "tokenization_kwargs", "mm_processor_kwargs", "tool_choice",
        "parallel_tool_calls",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"add_generation_promt": False}, TypeError, "add_generation_promt"),
        ({"enable_thinking": False}, TypeError, "enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, InvalidRequestError, "'messages' is an arg"),
        ({"chat_template_kwargs": {"tools": []}}, InvalidRequestError, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, InvalidRequestError, "chat_template_kwargs"),
        ({"chat_template_content_format": "text"}, InvalidRequestError, "auto, string, openai"),
        ({"tools": [{"type": "x"}]}, InvalidRequestError, "tools"),
    ],
)
def test_an_argument_of_a_chat_without_effect_is_an_error_that_names_it(
    llm, arguments, error, says
):
    for chat in (llm.chat, llm.stream_chat):
        with pytest.raises(error, match=says):
            chat(HI, GREEDY, **arguments)


@pytest.mark.parametrize("name", ["tokenization_kwargs", "mm_processor_kwargs"])
def test_what_only_vllm_has_is_refused_by_name(llm, name):
    for call in (llm.generate, llm.chat):
        with pytest.raises(InvalidRequestError, match=f"{name}: is not supported: "):
            call(HI if call == llm.chat else "abc", GREEDY, **{name: {"x": 1}})


def test_a_field_of_a_prompt_that_nobody_reads_is_named(llm):
    with pytest.raises(InvalidRequestError, match="multi_modal_data"):
        llm.generate({"prompt": "abc", "multi_modal_data": {"image": 1}}, GREEDY)
    plain = {"prompt": "abc", "multi_modal_data": None, "cache_salt": "me"}
    assert len(llm.generate(plain, GREEDY)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([1, 2, 3]),
        [np.int64(1), 2, np.int32(3)],
        np.array([[1, 2, 3]]),
        [np.array([1, 2, 3])],
        {"prompt_token_ids": np.array([1, 2, 3])},
        (1, 2, 3),
    ],
)
def test_token_ids_of_numpy_are_token_ids(llm, prompts):
    (output,) = llm.generate(prompts, GREEDY)
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.outputs[0].token_ids == llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize("prompts", [np.array([1.0]), [np.bool_(True)], np.array([[1.5, 2]])])
def test_other_numbers_are_none(llm, prompts):
    with pytest.raises((InvalidRequestError, TypeError), match="integers|numbers"):
        llm.generate(prompts, GREEDY)


def test_progress_is_shown_by_what_is_given(llm):
    class CountingBar:
        def __init__(self, total, desc):
            self.total, self.done, self.is_closed = total, 0, False
            bars.append(self)

        def update(self, n):
            self.done += n

        def close(self):
            self.is_closed = True

    bars = []
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=CountingBar)
    (bar,) = bars
    assert (bar.total, bar.done, bar.is_closed) == (3, 3, True)


def test_prompts_with_a_lower_priority_are_served_first(tiny_model):
    with LLM(str(tiny_model), num_blocks=64, max_num_seqs=1, threads=1) as llm:
        outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[5, 0, np.int64(-5)])
        times = [output.metrics.ttft for output in outputs]
        assert times[2] < times[1] < times[0]
        for wrong in ([1], [1, 2, "x"]):
            with pytest.raises(InvalidRequestError, match="priority"):
                llm.generate(["a", "b", "c"], GREEDY, priority=wrong)


def test_the_kinds_of_output_of_a_stream(llm):
    whole = llm.generate("abc", GREEDY)[0].outputs[0]
    deltas = list(llm.stream("abc", GREEDY.with_changes(output_kind=RequestOutputKind.DELTA)))
    assert [chunk.output.outputs[0].token_ids for chunk in deltas] == [
        chunk.token_ids for chunk in deltas
    ]
    assert sum([chunk.token_ids for chunk in deltas], []) == whole.token_ids
    final = GREEDY.with_changes(output_kind=RequestOutputKind.FINAL_ONLY)
    (chunk,) = llm.stream("abc", final)
    assert (chunk.text, chunk.token_ids) == (whole.text, whole.token_ids)
    assert chunk.output.outputs[0].text == whole.text and chunk.finish_reason == "length"
    (output,) = llm.generate("abc", GREEDY.with_changes(output_kind=RequestOutputKind.DELTA))
    assert output.outputs[0].token_ids == whole.token_ids


def test_samples_share_their_prompt(llm):
    params = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate("a prompt of some length, to be shared by all", params)
    texts = [tuple(completion.token_ids) for completion in output.outputs]
    assert len(set(texts)) == 4
    (again,) = llm.generate("a prompt of some length, to be shared by all", params)
    assert [tuple(completion.token_ids) for completion in again.outputs] == texts


def test_a_bad_prompt_fails_alone(llm):
    outputs = llm.generate(["good", "", [999], "x" * 300, "fine"], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    assert "empty" in outputs[1].error and "outside the vocabulary" in outputs[2].error
    assert "300 tokens" in outputs[3].error
    assert outputs[1].outputs[0].finish_reason == "error"
    expected = llm.generate("good", GREEDY)[0].outputs[0].token_ids
    assert outputs[0].outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("", InvalidRequestError), ([260], InvalidRequestError), ("x" * 200, PromptTooLongError)],
)
def test_if_nothing_can_be_served_the_reason_is_raised(llm, prompt, error):
    with pytest.raises(error):
        llm.generate(prompt, GREEDY)
    with pytest.raises(error):
        llm.stream(prompt, GREEDY)
    assert not llm._text_engine.has_unfinished_requests


def test_best_of_cannot_be_streamed(llm):
    with pytest.raises(InvalidRequestError, match="best_of"):
        llm.stream("a", SamplingParams(best_of=2))


def test_more_prompts_than_the_queue_holds(tiny_model):
    with LLM(str(tiny_model), num_blocks=64, max_queued_requests=2, max_num_seqs=2) as llm:
        outputs = llm.generate([f"prompt {i}" for i in range(12)], GREEDY)
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


def test_a_request_that_raises_fails_and_no_later_ones(tiny_model, monkeypatch):
    with LLM(str(tiny_model), num_blocks=64) as llm:
        executor = llm._text_engine.engine.executor
        monkeypatch.setattr(executor, "submit", lambda batch: 1 / 0)
        (output,) = llm.generate("a", GREEDY)
        assert output.outputs[0].finish_reason == "error" and "ZeroDivision" in output.error
        monkeypatch.undo()
        assert llm.generate("a", GREEDY)[0].outputs[0].finish_reason == "length"
        assert not llm._text_engine._samples and not llm._text_engine.groups


def test_static_and_continuous_batching_agree(tiny_model, llm):
    prompts = [f"prompt {i}" for i in range(6)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    with LLM(str(tiny_model), num_blocks=64, batching="static", max_num_seqs=2) as static:
        outputs = static.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_engine_info_is_the_contracts(llm):
    info = llm.engine_info()
    assert list(info) == [
        "device",
        "dtype",
        "kernels",
        "isa",
        "weights_bytes",
        "kv_blocks",
        "block_size",
    ]
    assert (info["device"], info["dtype"]) == ("cpu", "float32")
    kernels = ("native", library.load().isa) if library.runnable() else ("reference", None)
    assert (info["kernels"], info["isa"]) == kernels
    assert (info["kv_blocks"], info["block_size"]) == (64, 16)


def test_bf16_kv(tiny_model, llm):
    with LLM(str(tiny_model), num_blocks=64, kv_cache_dtype="bf16") as half:
        outputs = half.generate("abc", GREEDY)
    assert len(outputs[0].outputs[0].token_ids) == 8


def test_settings_and_models_that_are_not_there(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="did you mean block_size"):
        LLM(str(tiny_model), blok_size=4)
    with pytest.raises(ModelNotFoundError):
        LLM("no-such-model")
    with pytest.raises(ModelNotFoundError):
        LLM(str(tmp_path / "nowhere.gguf"))
    with pytest.raises(ConfigError, match="not quantized"):
        LLM(str(tiny_model), quantization="awq")
    with pytest.raises(ConfigError, match="enforce_eager: graphs are captured on GPUs alone"):
        LLM(str(tiny_model), device="cpu", enforce_eager=True)
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match="tokenizer"):
        LLM(str(copy))
