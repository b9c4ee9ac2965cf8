"""The default model, from its name to its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

import octavo
from octavo import LLM, SamplingParams
from octavo.core.request import Request
from octavo.serving.load import load_engine
from octavo.settings.engine import EngineArgs

pytestmark = [pytest.mark.slow, pytest.mark.network]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    with LLM("smollm2-135m", max_model_len=512) as llm:
        yield llm


def test_it_knows_capitals(llm):
    (output,) = llm.generate("The capital of France is", GREEDY)
    assert output.outputs[0].text.startswith(" Paris.")
    # Not of France: there the model starts "The" or "L'Étoile" with almost the same probability.
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of Japan?"}], GREEDY)
    assert "Tokyo" in output.outputs[0].text
    assert output.prompt.startswith("<|im_start|>system\n")


def test_an_answer_in_company_is_the_answer_alone(llm):
    prompts = ["Water boils at", "Once upon a time", "def main():", "The capital of France is"]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in prompts]
    together = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


def test_windows_give_blocks_back_and_the_answer_stays(gemma3_gguf):
    """Gemma 3 270M: 15 of 18 layers see 512 positions."""
    text = (Path(octavo.__file__).parent / "quantize" / "calibration_text.txt").read_text()

    def answer(enabled: bool) -> tuple[list[int], int]:
        """And the layers times blocks that were held at most."""
        args = EngineArgs(str(gemma3_gguf), max_model_len=2048, enable_window_tables=enabled)
        loaded = load_engine(args)
        prompt = loaded.text_engine.tokenizer.encode(text)[:1500]
        request = Request("long", prompt, GREEDY, 0.0)
        engine, held = loaded.text_engine.engine, 0
        engine.add(request)
        while (step := engine.step()) is not None:
            held = max(held, step.stats.num_used_blocks)
        groups = loaded.config.cache.groups
        return request.output_token_ids, held * (18 if groups is None else groups.layers_per_block)

    one_table, of_windows = answer(False), answer(True)
    assert of_windows[0] == one_table[0]
    assert of_windows[1] < 0.5 * one_table[1]


@pytest.mark.parametrize(
    ("model", "num_tokens", "num_blocks"),
    [("smollm2_gguf", 500, 40), ("gemma3_gguf", 900, 6 * 64)],  # six groups, five with windows
)
def test_an_evicted_prefix_comes_back_from_disk_and_after_a_restart(
    request, tmp_path, model, num_tokens, num_blocks
):
    """With its own tokens and probabilities, and without being computed again."""
    text = (Path(octavo.__file__).parent / "quantize" / "calibration_text.txt").read_text()
    args = EngineArgs(
        str(request.getfixturevalue(model)),
        max_model_len=num_tokens + 12,
        num_blocks=num_blocks,
        kv_offload=f"{tmp_path / 'kv'}:100MiB",
    )
    answers: list[tuple[int, list[int], list[float], float]] = []

    def serve(loaded, name: str, begin: int) -> None:
        prompt = loaded.text_engine.tokenizer.encode(text[begin:])[:num_tokens]
        request = Request(name, prompt, GREEDY, 0.0)
        engine, computed, logprobs = loaded.text_engine.engine, 0, []
        engine.add(request)
        while engine.has_unfinished_requests:
            if (step := engine.step()) is not None:
                computed += sum(
                    min(item.end, len(prompt)) - item.start
                    for item in step.batch.items
                    if item.start < len(prompt)
                )
                logprobs += [each.logprob for u in step.updates for each in u.logprobs]
        from_disk = engine.stats().prefix_tokens_from_disk
        answers.append((computed, request.output_token_ids, logprobs, from_disk))

    loaded = load_engine(args)
    for name, begin in (("cold", 0), ("other", 5000), ("evicted", 0)):
        serve(loaded, name, begin)
    loaded.text_engine.engine.close()
    loaded = load_engine(args)
    serve(loaded, "restarted", 0)
    loaded.text_engine.engine.close()
    cold, _, evicted, restarted = answers
    assert evicted[1:3] == restarted[1:3] == cold[1:3]
    whole = num_tokens // 16 * 16
    assert cold[0] - evicted[0] == cold[0] - restarted[0] == whole
    assert restarted[3] == whole
