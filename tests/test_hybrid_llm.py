"""Models with recurrent layers under the public API: sized, cached, refused what they cannot."""

from __future__ import annotations

import shutil

import pytest
from tiny_hybrids import make_model

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPT = "a prompt of some bytes, long enough to fill more than one block of them"


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """Of a hybrid, with a tokenizer."""
    folder = tmp_path_factory.mktemp("hybrid")
    make_model("lfm2", vocab_size=260, eos_token_id=256, bos_token_id=257).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_model / name, folder / name)
    return str(folder)


def answers(llm, *prompts):
    return [each.outputs[0].token_ids for each in llm.generate([*prompts], PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_answers_do_not_depend_on_what_is_cached(folder, kernels):
    with LLM(folder, kernels=kernels, max_num_seqs=2, max_num_batched_tokens=33) as llm:
        cold = answers(llm, PROMPT, PROMPT + "!", "another")
        assert answers(llm, "another", PROMPT + "!", PROMPT) == cold[::-1]
        (again,) = llm.generate(PROMPT, PARAMS)
        assert again.num_cached_tokens == 64  # of 71, and whole blocks
    with LLM(folder, kernels=kernels, enable_prefix_caching=False) as llm:
        assert answers(llm, PROMPT, PROMPT + "!", "another") == cold


def test_slots_take_their_part_of_the_memory(folder):
    with LLM(folder, kernels="reference", max_num_seqs=3) as llm:
        config = llm.config
        assert config.cache.num_state_slots == 12  # of three requests, and as many snapshots
        assert any("states: 12 slots" in choice for choice in config.choices)


def test_speculation_is_refused(folder):
    with pytest.raises(ConfigError, match="has recurrent layers"):
        LLM(folder, kernels="reference", spec_method="ngram")
