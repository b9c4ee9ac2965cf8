"""Random models are models: both kinds of kernels run them, and agree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.kernels.cpu.library import runnable
from octavo.models.gguf import GGUFFile
from octavo.quantization.ggml_types import GGMLType

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_random.py"

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_random", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_random"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_random"]


@pytest.fixture(scope="module", params=["q4_k_m", "q4_0"])
def model(request, script, smollm2_gguf, tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / f"{request.param}.gguf"
    shape = script.llama(256, 8, 512, 4, 2, 64, 49_200, True)
    script.write_random(path, shape, request.param, smollm2_gguf)
    return path


def test_types_are_those_of_the_mix(model):
    with GGUFFile(model) as file:
        types = {name: tensor.type for name, tensor in file.tensors.items()}
    assert types["token_embd.weight"] == GGMLType.Q6_K
    usual = GGMLType.Q4_K if "q4_k_m" in model.name else GGMLType.Q4_0
    assert types["blk.0.attn_q.weight"] == types["blk.1.ffn_down.weight"] == usual
    outer = GGMLType.Q6_K if "q4_k_m" in model.name else GGMLType.Q4_0
    assert types["blk.0.ffn_down.weight"] == types["blk.7.attn_v.weight"] == outer


@pytest.mark.skipif(not runnable(), reason="no native library was built")
def test_native_and_reference_kernels_agree(model):
    """With activations of 15 bits and exact keys, they compute the same."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=5, ignore_eos=True)
    found = []
    for settings in ({"kernels": "native", "activations": "int16"}, {"kernels": "reference"}):
        with LLM(str(model), kv_cache_dtype="f32", num_blocks=16, **settings) as llm:
            [output] = llm.generate([[5, 600, 7000, 48_000]], params)
            found.append(output.outputs[0])
    native, reference = found
    assert native.token_ids == reference.token_ids
    for ours, theirs in zip(native.logprobs, reference.logprobs, strict=True):
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(
            [ours[token].logprob for token in ours],
            [theirs[token].logprob for token in ours],
            atol=1e-4,
        )
