"""Families of models against transformers: logits, greedy tokens, and their GGUF files."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_transformers import FAMILIES, VOCAB
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.base.errors import UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.models.parameters import Parameters
from octavo.quantization.ggml_types import GGMLType

PROMPTS = [
    torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (96, 71, 40)
]


@pytest.fixture(scope="module")
def made(tiny_hf):
    """The folder of a family's model, and the logits of PROMPTS as transformers has them."""
    known = {}

    def make(name):
        if name not in known:
            known[name] = tiny_hf(name), theirs_of(tiny_hf(name))
        return known[name]

    return make


def theirs_of(folder, prompts=PROMPTS):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def difference(ours, theirs):
    """The largest; and a check that the best token is the same where rounding does not decide."""
    for a, b in zip(ours, theirs, strict=True):
        top = b.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2e-3
        assert torch.equal(a.argmax(-1)[clear], b.argmax(-1)[clear])
    return difference_of(ours, theirs)


def difference_of(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, made, driver):
    folder, theirs = made(name)
    assert difference(driver(folder).logits(PROMPTS), theirs) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_native_logits_too(name, made, native_driver):
    folder, theirs = made(name)
    assert difference(native_driver(folder).logits(PROMPTS), theirs) < 1e-3


# Of those that GGUF files cannot say: a scale that llama.cpp takes from the size of heads, windows
# or layers without rope in another period than its own, activations that it does not ask for.
NOT_IN_GGUF = {
    "gemma2": "attention_scale",
    "smollm3-odd": "unrotated_layers",
    "cohere2-odd": "sliding window",
    "gpt2-odd": "activation",
    "opt": "no name",
    "opt-odd": "no name",
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_IN_GGUF])
def test_files_lead_there_and_back(name, made, native_driver, tmp_path):
    """A folder as a GGUF file, which answers the same; that as a folder, the same to the bit."""
    folder, theirs = made(name)
    gguf = tmp_path / "model.gguf"
    export_gguf(gguf, open_checkpoint(folder), lambda matrix: GGMLType.F32)
    assert difference(native_driver(gguf).logits(PROMPTS), theirs) < 1e-3
    write_hf_folder(tmp_path / "back", open_checkpoint(gguf))
    before, after = (Parameters(open_checkpoint(path)) for path in (folder, tmp_path / "back"))
    but = ("name", "bos_token_id", "architecture")  # Mistral without windows comes back as Llama
    assert before.config.differences(after.config, but) == []
    assert tensors_of(tmp_path / "back") == tensors_of(folder)
    for parameter in before.names:
        is_shifted = before.config.norm_plus_one and parameter.endswith("norm.weight")
        exact = {"rtol": 0, "atol": 1e-6 if is_shifted else 0}
        np.testing.assert_allclose(before.rows(parameter), after.rows(parameter), **exact)
    assert difference(theirs_of(tmp_path / "back"), theirs) < 1e-4


@pytest.mark.parametrize("name", ["phi3", "gpt2", "glm4"])
def test_blocks_of_fused_tensors(name, tiny_hf, driver, native_driver, tmp_path):
    """Rows of a tensor that several parameters share, quantized: each has its own."""
    folder, path = tiny_hf(name), tmp_path / "model.gguf"

    def quantize(type, rows, parameter):
        return gguf.quants.quantize(rows, gguf.GGMLQuantizationType(type))

    export_gguf(path, open_checkpoint(folder), lambda matrix: GGMLType.Q8_0, quantize)
    exact, rounded = (Parameters(open_checkpoint(each)) for each in (folder, path))
    for parameter in exact.names:
        if len(exact.shape(parameter)) == 2:
            blocks = quantize(GGMLType.Q8_0, exact.rows(parameter), parameter)
            expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            assert np.array_equal(rounded.rows(parameter), expected), parameter
    reference = driver(path).logits(PROMPTS)
    native = native_driver(path, activations="int16").logits(PROMPTS)
    assert difference_of(native, reference) < 1e-2


@pytest.mark.parametrize("name", NOT_IN_GGUF)
def test_what_a_gguf_file_cannot_say_is_an_error(name, made, tmp_path):
    folder, _ = made(name)
    with pytest.raises(UnsupportedModelError, match=NOT_IN_GGUF[name]):
        export_gguf(tmp_path / "model.gguf", open_checkpoint(folder), lambda m: GGMLType.F32)


def tensors_of(folder):
    """Names and shapes, but for a head that is tied."""
    with safe_open(folder / "model.safetensors", "np") as file:
        names = set(file.keys()) - {"lm_head.weight"}
        return {name: file.get_slice(name).get_shape() for name in names}


def test_short_sequences_of_longrope(tiny_hf, driver):
    """Where none is longer than in training, divisors are the others, as for these transformers."""
    folder = tiny_hf("phi3-longrope")
    config = open_checkpoint(folder).config()
    assert config.for_length(None) is config.for_length(33) is config
    short = [prompt[:32] for prompt in PROMPTS]
    theirs = theirs_of(folder, short)
    assert difference(driver(folder, config=config.for_length(32)).logits(short), theirs) < 1e-4
    assert difference_of(driver(folder).logits(short), theirs) > 1e-2


GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
LATENT = ["deepseek-v2", "deepseek-v2-groups-yarn", "deepseek-v3"]  # odd sizes, low-rank queries


@pytest.mark.parametrize("name", [*FAMILIES, *LATENT])
def test_greedy_answers_of_the_engine_are_those_of_transformers(name, tiny_hf):
    """In blocks that do not suffice for all, so that requests are preempted and begin again."""
    prompts = [prompt[:33] for prompt in PROMPTS]
    # Layers with windows keep theirs in groups, each of which needs some more.
    num_blocks = 60 if any(open_checkpoint(tiny_hf(name)).config().layer_windows) else 16
    with LLM(str(tiny_hf(name)), kv_cache_dtype="f32", threads=1, num_blocks=num_blocks) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    if num_blocks == 16:
        assert any(output.metrics.num_preemptions for output in outputs)
    model = AutoModelForCausalLM.from_pretrained(tiny_hf(name), attn_implementation="eager")
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = torch.tensor(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens.tolist()])).logits[0, 32:-1]
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        assert len(tokens) == 64 and (logits.max(-1).values - chosen).max() < 2e-3
