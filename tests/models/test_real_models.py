"""Real weights against transformers, which dequantizes the same GGUF files to float32."""

from __future__ import annotations

import warnings

import pytest
import torch

from octavo.models.gguf import GGUFFile

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
PROMPT_LENGTH = 6
AT_ONCE = 4  # prompts whose logits are in memory together
PROMPTS = """\
The capital of France is a city that
Once upon a time there was a little
To make bread you need flour, water and
The first law of thermodynamics says that energy
def fibonacci(n): return n if n <
My grandmother used to tell me that the
In the year 1969, two men walked
The recipe calls for three eggs, some sugar
Dear Sir or Madam, I am writing to
Photosynthesis is the process by which green plants
The stock market fell sharply on Monday after
import numpy as np; x = np.mean(
She opened the door and saw that nobody
The quick brown fox jumps over the lazy
Water boils at a temperature of one hundred
There are seven days in a week, and
The old lighthouse keeper climbed the stairs every
In mathematics, a prime number is one that
He said that he would never go back
A good teacher knows that every student learns
""".splitlines()


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other lose more than they win where others use the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def encode(text, vocabulary, space):
    """Longest match from the left: not what the tokenizer does, but close to how text looks."""
    text, tokens = text.replace(" ", space), []
    while text:
        length = next(n for n in range(len(text), 0, -1) if text[:n] in vocabulary)
        tokens.append(vocabulary[text[:length]])
        text = text[length:]
    return tokens


def make_prompts(path, space, bos):
    """20 prompts of the same length, so that transformers can run them as one batch."""
    tokens = GGUFFile(path).metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    prompts = [bos + encode(text, vocabulary, space)[:PROMPT_LENGTH] for text in PROMPTS]
    assert len(prompts) == 20 and len({tuple(prompt) for prompt in prompts}) == 20
    assert all(len(prompt) == len(bos) + PROMPT_LENGTH for prompt in prompts)
    return prompts


def load_reference(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()


def check(ours, theirs):
    """Agreement to 1e-3, and the same best token wherever it leads by more than that."""
    assert (ours - theirs).abs().max() <= 1e-3
    top = theirs.topk(2).values
    clear = top[..., 0] - top[..., 1] > 1e-3
    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


@torch.no_grad()
def compare(path, prompts, driver):
    """64 greedy tokens of every prompt, and logits at all positions of prompt and answer.

    If transformers, shown a prompt and our answer, finds each token of the answer the best one
    after those before it, then its own greedy answer is the same, by induction.
    """
    ours, theirs = driver(path), load_reference(path)
    answers = ours.greedy(prompts, NUM_TOKENS)
    for start in range(0, len(prompts), AT_ONCE):
        whole = [p + a for p, a in zip(prompts, answers, strict=True)][start : start + AT_ONCE]
        expected = theirs(torch.tensor(whole)).logits
        check(torch.stack(ours.logits(whole)), expected)
        best = expected[:, -NUM_TOKENS - 1 : -1].argmax(-1).tolist()
        assert best == answers[start : start + AT_ONCE]
    return ours, theirs


def test_smollm2(smollm2_gguf, driver):
    compare(smollm2_gguf, make_prompts(smollm2_gguf, "Ġ", []), driver)


def test_gemma3(gemma3_gguf, driver):
    prompts = make_prompts(gemma3_gguf, "▁", [2])
    ours, theirs = compare(gemma3_gguf, prompts, driver)

    # A prompt that is longer than the window of 512; the last logits depend on all of it.
    long = sum(prompts, start=[])[:130] * 5
    with torch.no_grad():
        expected = theirs(torch.tensor([long]), logits_to_keep=8).logits[0]
    check(ours.logits([long], last=8)[0], expected)
