"""Models with experts: random checkpoints, as transformers saves them, against transformers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import gguf
import pytest
import tiny_hybrids
import torch
from loading import load_model
from safetensors.torch import load_file, save_file
from tiny_transformers import EXPERT_CASES, make_model
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError, ModelFileError, UnsupportedModelError
from octavo.kernels.cpu.layout import experts_bytes
from octavo.models.checkpoint import open_checkpoint
from octavo.models.checkpoint_check import inspect_model
from octavo.models.gguf_export import export_gguf
from octavo.models.hf_writer import write_hf_folder
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.levels import E2M1
from octavo.quantize.methods import QuantizeRequest
from octavo.quantize.quantization_job import make
from octavo.runtime.capacity import RankSpec
from octavo.runtime.rank import Rank
from octavo.sources.open import load_tokenizer

# Of float32 sums in another order; where logits of two experts are nearly equal, more would differ.
TOLERANCE, NATIVE_TOLERANCE = 1e-4, 1e-3

# Qwen's GGUF files have experts in all layers, and llama.cpp always normalizes Qwen 3's weights.
OTHER_SHAPES = ("mixtral", "qwen2-moe-mixed", "qwen3-moe-step", "glm4-moe", "olmoe", "granite-moe")
NOT_IN_GGUF = ("qwen2-moe-mixed", "qwen3-moe-step")
ARCHITECTURES = {
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
}


IDS = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}


class Case(NamedTuple):
    name: str
    model: torch.nn.Module
    folder: Path
    prompts: list[list[int]]
    logits: list[torch.Tensor]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """What transformers answers."""
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            answer = self.model.generate(ids, max_new_tokens=num_tokens, **options)
        return answer[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def tiny_experts(tiny_model, tmp_path_factory):
    """``tiny_experts(name)``: the folder of a model, with a tokenizer."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make_model(name, **IDS).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tiny_model / file, folder / file)
        return folder

    return make


@pytest.fixture(scope="module")
def make_case(tiny_experts):
    @cache
    def make(name: str) -> Case:
        model = make_model(name, **IDS)
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(3, 70, (6,), generator=generator).tolist()
        prompts = [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]
        with torch.no_grad():
            logits = [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
        return Case(name, model, tiny_experts(name), prompts, logits)

    return make


@pytest.fixture(params=EXPERT_CASES)
def case(request, make_case):
    """A model of transformers', saved, and what it says of some prompts."""
    return make_case(request.param)


def largest_difference(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_logits_agree(case, driver):
    logits = driver(case.folder).logits(case.prompts)
    assert largest_difference(logits, case.logits) < TOLERANCE


def test_native_logits_agree(case, native_driver):
    logits = native_driver(case.folder).logits(case.prompts)
    assert largest_difference(logits, case.logits) < NATIVE_TOLERANCE


@pytest.mark.parametrize("kernels", ["native", "fused", "reference"])
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
def test_an_engine_answers_the_same(name, make_case, kernels):
    """With chunks of prompts among single tokens, blocks for two of three requests, and so some
    preemption."""
    case = make_case(name)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    sizes = {"num_blocks": 17, "max_num_batched_tokens": 32, "max_model_len": 128, "threads": 1}
    prompts = case.prompts[:3]
    with LLM(str(case.folder), kernels=kernels, kv_cache_dtype="f32", **sizes) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
        tokens = llm._text_engine.engine.executor.probe().expert_loads()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.outputs[0].token_ids == case.greedy(prompt, 48)
    if kernels == "native":
        config = open_checkpoint(case.folder).config()
        computed = sum(len(prompt) + 47 for prompt in prompts)
        assert {len(layer) for layer in tokens} == {config.experts.routing.num_experts}
        assert sum(map(sum, tokens)) >= computed * config.num_layers * config.experts.routing.top_k


@pytest.mark.parametrize("name", [name for name in EXPERT_CASES if name not in OTHER_SHAPES])
def test_64_greedy_tokens_of_each_family(name, make_case):
    case = make_case(name)
    prompt = case.prompts[1][:60]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    sizes = {"num_blocks": 32, "max_num_batched_tokens": 32, "max_model_len": 128, "threads": 1}
    with LLM(str(case.folder), kernels="native", kv_cache_dtype="f32", **sizes) as llm:
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
    assert answer.outputs[0].token_ids == case.greedy(prompt, 64)


def as_f32(matrix):
    return GGMLType.F32


def test_gguf_files_are_the_same_model(case, native_driver, tmp_path):
    out = tmp_path / "model.gguf"
    if case.name in NOT_IN_GGUF:
        with pytest.raises(UnsupportedModelError, match="cannot say its experts"):
            export_gguf(out, open_checkpoint(case.folder), as_f32)
        return
    export_gguf(out, open_checkpoint(case.folder), as_f32)
    assert inspect_model(out).problems == () and inspect_model(case.folder).problems == ()
    logits = native_driver(out).logits(case.prompts)
    assert largest_difference(logits, case.logits) < NATIVE_TOLERANCE
    theirs = {tensor.name: tensor.shape for tensor in gguf.GGUFReader(out).tensors}
    known = gguf.MODEL_TENSORS[ARCHITECTURES[open_checkpoint(out).config().architecture]]
    templates = {gguf.TENSOR_NAMES[tensor] for tensor in known}
    names = {re.sub(r"\d+", "{bid}", name.rpartition(".")[0]) for name in theirs}
    assert names <= templates


def test_folders_have_the_tensors_that_transformers_wrote(case, tmp_path):
    checkpoint = open_checkpoint(case.folder)
    write_hf_folder(tmp_path / "out", checkpoint)
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", case.folder)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor.float()) for name, tensor in theirs.items())


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss-odd", "granite-moe", "granite-moe-odd"])
def test_transformers_reads_tensors_of_all_experts(name, make_case, tmp_path):
    case = make_case(name)
    write_hf_folder(tmp_path, open_checkpoint(case.folder))
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in case.prompts]
    assert all(map(torch.equal, logits, case.logits))


def test_experts_beside_recurrent_layers_are_written(tmp_path):
    tiny_hybrids.make_model("granite-experts").save_pretrained(tmp_path / "source")
    write_hf_folder(tmp_path / "out", open_checkpoint(tmp_path / "source"))
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "source"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor.float()) for name, tensor in theirs.items())


def encode(type, rows, parameter):
    return gguf.quants.quantize(rows, gguf.GGMLQuantizationType(type))


@pytest.mark.parametrize("type", [GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.MXFP4])
def test_experts_in_blocks(type, tiny_experts, driver, native_driver, tmp_path):
    """Rows are rounded to 15 bits on the way into native products, and not in the reference."""
    out, prompts = tmp_path / "model.gguf", [[5, 7, 9, 11] * 6]

    def type_of(matrix):
        return type if "_exps" in matrix.name else GGMLType.F32

    export_gguf(out, open_checkpoint(tiny_experts("gpt-oss")), type_of, encode)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    assert tensors["blk.1.ffn_up_exps.weight"].tensor_type.name == type.name
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"
    assert tensors["blk.1.ffn_up_exps.weight"].shape.tolist() == [64, 96, 6]
    (expected,) = driver(out).logits(prompts)
    (made,) = native_driver(out, activations="int16").logits(prompts)
    assert (made - expected).abs().max() < 1e-3 * expected.abs().max()


def test_mxfp4_of_gpt_oss(tiny_experts, driver, tmp_path):
    """Blocks and exponents as its folders have them, and the numbers that they stand for as floats
    have them: turned, and gate and up in one."""
    source = tiny_experts("gpt-oss")
    tensors, blocks = load_file(source / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        packed = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(122, 126, packed.shape[:3], generator=generator, dtype=torch.uint8)
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(3)
        values = torch.from_numpy(E2M1)[codes.int()] * torch.exp2(scales.float() - 127)[..., None]
        tensors[name] = values.flatten(2).transpose(1, 2).contiguous()
        blocks |= {f"{name}_blocks": packed, f"{name}_scales": scales}
    config = json.loads((source / "config.json").read_text())
    logits = []
    for quantized in (False, True):
        folder = tmp_path / str(quantized)
        folder.mkdir()
        if quantized:
            config["quantization_config"] = {"quant_method": "mxfp4"}
            tensors = {k: v for k, v in tensors.items() if f"{k}_blocks" not in blocks} | blocks
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        logits += driver(folder).logits([[5, 7, 9, 11] * 6])
    assert torch.equal(*logits)


def test_rows_of_experts_are_kept_free_beside_the_pool(tiny_experts):
    spec = RankSpec(tiny_experts("qwen3-moe"), kernels="native", threads=1)
    experts = open_checkpoint(spec.path).config().experts
    planned = Rank.load(spec).backend.planned_memory()
    assert sum(line.num_bytes for line in planned) == experts_bytes(
        64, experts.inner, experts.routing.top_k, 2048
    )


def test_experts_of_another_number_are_told(tiny_experts, tmp_path):
    source = tiny_experts("gpt-oss")
    config = json.loads((source / "config.json").read_text()) | {"num_local_experts": 4}
    shutil.copyfile(source / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="for 4 experts"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_octavo_makes_experts_smaller_in_gguf_files(name, tiny_experts, tmp_path):
    folder, out = tiny_experts(name), tmp_path / "model.gguf"
    tokenizer = load_tokenizer(folder)
    make(
        open_checkpoint(folder),
        tokenizer,
        out,
        QuantizeRequest("gguf", type="Q8_0", calibrate=False),
    )
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert {type for name, type in types.items() if "_exps.weight" in name} == {"Q8_0"}
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"
    for wanted in (
        QuantizeRequest("rtn", bits=4),
        QuantizeRequest("gguf", type="Q8_0", rotate=True),
    ):
        with pytest.raises(ConfigError, match="has experts"):
            make(open_checkpoint(folder), tokenizer, tmp_path / "other", wanted)


def test_experts_in_blocks_of_fp8_become_those_of_gguf(tiny_experts, driver, tmp_path):
    """A model that is published in FP8, with a scale for each block of 128 by 128."""
    folder, source, out = tiny_experts("qwen3-moe"), tmp_path / "fp8", tmp_path / "model.gguf"
    tokenizer, wanted = (
        load_tokenizer(folder),
        QuantizeRequest("gguf", type="Q8_0", calibrate=False),
    )
    make(
        open_checkpoint(folder),
        tokenizer,
        source,
        QuantizeRequest("fp8", format="fp8", calibrate=False),
    )
    method = json.loads((source / "config.json").read_text())["quantization_config"]
    stored = load_file(source / "model.safetensors")["model.layers.0.mlp.experts.5.up_proj.weight"]
    assert method["weight_block_size"] == [128, 128] and stored.dtype == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="is quantized already"):
        make(open_checkpoint(source), tokenizer, out, wanted)
    make(open_checkpoint(source), tokenizer, out, replace(wanted, requantize=True))
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert types["blk.1.ffn_gate_exps.weight"] == types["blk.1.ffn_up_exps.weight"] == "Q8_0"
    prompts = [[5, 7, 9, 11] * 6]
    (plain,), (rounded,), (made,) = (driver(path).logits(prompts) for path in (folder, source, out))
    assert (made - rounded).norm() < 0.3 * (rounded - plain).norm()
