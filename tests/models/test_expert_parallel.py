"""Engines whose ranks are processes with whole experts: tiny models of families that have some."""

from __future__ import annotations

import gc
import sys

import pytest
from tiny_transformers import EXPERT_CASES

from octavo import LLM, SamplingParams, cli
from octavo.base.errors import ConfigError
from octavo.kernels.cpu import library
from octavo.serving.expert_files import read_loads

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux alone"),
]
PROMPTS = [[5, 9, 13, 21], [7, 8], list(range(20, 90))]
SETTINGS = {"threads": 2, "max_model_len": 128, "kernels": "native"}
TWO_RANKS = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **SETTINGS}


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, logprobs=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


def test_experts_in_order_and_by_a_placement_with_copies(tiny_hf, tmp_path):
    path, loads, placement = str(tiny_hf("mixtral")), tmp_path / "loads", tmp_path / "placement"
    with LLM(path, save_expert_loads=str(loads), **SETTINGS) as llm:
        expected = answers(llm)
    del llm
    gc.collect()
    counted = read_loads(loads)
    assert all(sum(layer) > 0 for layer in counted.loads)
    assert cli.main(["place-experts", str(loads), str(placement), "--ranks=2", "--slots=4"]) == 0
    for more in ({}, {"expert_placement": str(placement)}):
        with LLM(path, **TWO_RANKS, **more) as llm:
            assert answers(llm) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", EXPERT_CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_family(tiny_hf, name, size):
    path = str(tiny_hf(name))
    settings = {**TWO_RANKS, "tensor_parallel_size": size, "threads": size}
    with LLM(path, **SETTINGS) as llm:
        expected = answers(llm)
    try:
        shared = LLM(path, **settings)
    except ConfigError as error:
        assert "the nearest is" in str(error)
        return
    with shared:
        assert answers(shared) == expected


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("llama", {}, "has no experts"),
        ("mixtral", {"expert_placement": "none.json"}, "cannot be read"),
        ("mixtral", {"tensor_parallel_size": 1}, "tensor_parallel_size, which is 1"),
        ("gpt-oss-odd", {"tensor_parallel_size": 4, "threads": 4}, "3 experts.*the nearest is 3"),
    ],
)
def test_what_cannot_be_is_refused(tiny_hf, name, more, said):
    with pytest.raises(ConfigError, match=said):
        LLM(str(tiny_hf(name)), **{**TWO_RANKS, **more})
