"""Encoders, and decoders without their head, against transformers: hidden states and heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_encoders import CLASSIFIERS, ENCODERS, make_encoder

from octavo import LLM
from octavo.core.pooling_params import PoolingParams

TOKENS = [
    torch.randint(3, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (96, 1, 71, 17, 5)
]
ROWS = PoolingParams(task="token_embed", use_activation=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a model, and the model as transformers has it."""
    known = {}

    def make(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("encoders")
            known[name] = folder, make_encoder(name, folder)
        return known[name]

    return make


def hidden_states(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_are_those_of_transformers(name, kernels, made):
    folder, model = made(name)
    with LLM(str(folder), kernels=kernels, runner="pooling", kv_cache_dtype="f32") as llm:
        assert llm.engine_info()["kernels"] == kernels
        outputs = llm.encode(TOKENS, ROWS)
    for tokens, output in zip(TOKENS, outputs, strict=True):
        theirs = hidden_states(model, tokens)
        assert np.abs(output.outputs.data - theirs).max() < 1e-4 * max(1, np.abs(theirs).max())


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_are_those_of_transformers(name, kernels, made):
    folder, model = made(name)
    model.config.pad_token_id = None  # else it looks for the last token that is none
    with torch.no_grad():
        theirs = [model(torch.tensor([tokens])).logits[0] for tokens in TOKENS]
    with LLM(str(folder), kernels=kernels) as llm:
        raw = llm.classify(
            TOKENS, pooling_params=PoolingParams(task="classify", use_activation=False)
        )
        scores = llm.classify(TOKENS)
    for logits, output, scored in zip(theirs, raw, scores, strict=True):
        assert output.outputs.probs == pytest.approx(logits.tolist(), abs=2e-4, rel=1e-4)
        probs = logits.sigmoid() if len(logits) == 1 else logits.softmax(0)
        assert scored.outputs.probs == pytest.approx(probs.tolist(), abs=1e-4)


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("name", ["bert-one", "modernbert-one", "roberta-one"])
def test_a_pair_has_the_types_of_its_tokenizer(name, kernels, made):
    folder, model = made(name)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    given = tokenizer(
        "what is it", "a cat, as it seems", return_tensors="pt", return_token_type_ids=True
    )
    types = given["token_type_ids"]
    assert types.tolist()[0] == [0] * 12 + [1] * 19
    has_types = name != "modernbert-one"  # RoBERTa has two types here, and its tokenizer them
    with torch.no_grad():
        more = {"token_type_ids": types} if has_types else {}
        (theirs,) = model(given["input_ids"], **more).logits[0].sigmoid().tolist()
        (without,) = model(given["input_ids"]).logits[0].sigmoid().tolist()
    with LLM(str(folder), kernels=kernels) as llm:
        (ours,) = llm.score("what is it", "a cat, as it seems")
        assert ours.prompt_token_ids == given["input_ids"][0].tolist()
    assert ours.outputs.score == pytest.approx(theirs, abs=1e-4)
    assert not has_types or abs(theirs - without) > 1e-3


def test_a_text_has_the_same_bits_in_any_company(made):
    folder, _ = made("modernbert")
    with LLM(str(folder)) as llm:
        alone = [llm.embed([tokens])[0].outputs.embedding for tokens in TOKENS]
    with LLM(str(folder), threads=1, max_num_seqs=2, max_num_batched_tokens=128) as llm:
        few = [each.outputs.embedding for each in llm.embed(TOKENS * 2)]
    assert few == alone * 2


def test_a_decoder_pools_long_texts_in_chunks(made):
    folder, model = made("qwen3-body")
    long = (TOKENS[0] + TOKENS[2])[:120]
    theirs = hidden_states(model, long)
    with LLM(str(folder), max_num_batched_tokens=16, kv_cache_dtype="f32") as llm:
        mean = llm.encode([long], PoolingParams(use_activation=False))
        rows = llm.encode([long], ROWS)
    assert llm.config.scheduler.max_num_batched_tokens == 16
    assert np.abs(mean[0].outputs.data - theirs[-1]).max() < 1e-3
    assert np.abs(rows[0].outputs.data - theirs).max() < 1e-3
