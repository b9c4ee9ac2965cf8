"""Whole models: made with every method in every format, loaded again, near to what they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from loading import load_model
from safetensors import safe_open

from octavo import LLM, SamplingParams, hub
from octavo.base.errors import ConfigError
from octavo.kernels.cpu import library
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_export import export_gguf
from octavo.quantization.ggml_types import GGMLType
from octavo.quantize import quantization_job as job_module
from octavo.quantize.layerwise_model import LayerwiseModel
from octavo.quantize.methods import METHODS, QuantizeRequest
from octavo.quantize.quantization_job import make
from octavo.sources.open import load_tokenizer
from tests.conftest import write_calm_model, write_tiny_model

pytestmark = pytest.mark.usefixtures("few_steps")

WINDOWS = torch.randint(256, (4, 48), generator=torch.Generator().manual_seed(5))
CASES = [
    (name, format) for name, method in METHODS.items() for format in (*method.writers, "gguf")
    if format != "gguf" or not method.writers
]  # fmt: skip
NUM_LINEAR, NUM_EMBEDDING, NUM_NORMS = 2 * (64 * 256 + 128 * 64 + 3 * 64 * 128), 260 * 64, 5 * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama whose rows are made of groups of all formats."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return write_calm_model(tmp_path_factory.mktemp("sources") / "llama", 0.2, **sizes, **heads)


@pytest.fixture(scope="module")
def source(folder, tmp_path_factory):
    """The same model by kind of file. Rows of q and k are in another order in GGUF files."""
    path = tmp_path_factory.mktemp("sources") / "llama.gguf"
    export_gguf(path, open_checkpoint(folder), lambda matrix: GGMLType.F32)
    return {"folder": folder, "gguf": path}


def wanted_of(method, format=None, **changes) -> QuantizeRequest:
    looks = METHODS[method].calibrated and format != "fp8"  # whose blocks need no text
    if looks and changes.get("calibrate", True):
        changes = {"calibration_tokens": 512, **changes}
    if METHODS[method].trains:  # in two steps, with a window held out
        changes = {**changes, "calibration_tokens": 1024, "train_tokens": 2048}
    return QuantizeRequest(method, format=format, **changes)


def quantized(source, out, wanted, **options):
    return make(open_checkpoint(source), load_tokenizer(source), out, wanted, **options)


def log_probabilities(path) -> torch.Tensor:
    model = LayerwiseModel(load_model(path).model, WINDOWS)
    for index in range(model.num_layers):
        model.run_layer(index, lambda name, x, weight: weight)
    return torch.cat([model.logits(window) for window in range(len(WINDOWS))]).log_softmax(dim=-1)


def divergence(path, other) -> float:
    """The mean KL divergence of one from another, in nats; between strangers it is above 4."""
    exact, found = log_probabilities(path), log_probabilities(other)
    return float((exact.exp() * (exact - found)).sum(dim=-1).mean())


def scores(path, **settings) -> np.ndarray:
    """Log probabilities of the tokens of all windows."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(path), kv_cache_dtype="f32", threads=1, **settings) as llm:
        outputs = llm.generate(WINDOWS.tolist(), params, use_tqdm=False)
    return np.array(
        [
            found[token].logprob
            for window, output in zip(WINDOWS.tolist(), outputs, strict=True)
            for token, found in list(zip(window, output.prompt_logprobs, strict=True))[1:]
        ]
    )


# What a method makes of a GGUF file is in any of its formats what it is in one.
FROM_FILES = {method: (method, format) for method, format in CASES}.values()


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "method, format, kind",
    [*((*case, "folder") for case in CASES), *((*case, "gguf") for case in FROM_FILES)],
)
def test_every_method_and_format(method, format, kind, source, tmp_path):
    made = quantized(source[kind], tmp_path / "out.gguf", wanted_of(method, format))
    assert (made.method, made.format, made.out) == (method, format, tmp_path / "out.gguf")
    lost = divergence(source["folder"], made.out)
    assert 0 < lost < {"fp8": 0.1, "gguf": 0.2}.get(method, 1.0)


@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
@pytest.mark.parametrize("method, format", {format: (m, format) for m, format in CASES}.values())
def test_the_kernels_agree_about_it(method, format, folder, tmp_path):
    made = quantized(folder, tmp_path / "out.gguf", wanted_of(method, format))
    reference = scores(made.out, kernels="reference", dtype="float32")
    native = scores(made.out, kernels="native", activations="int16")
    assert np.abs(native - reference).mean() < 0.01


@pytest.mark.parametrize("method", ["rtn", "fp8", "qat"])
def test_gemma(method, tmp_path):
    """Norms before and after, a head that is shared, and activations that need bfloat16."""
    from tiny_transformers import make_model

    source = write_tiny_model(tmp_path / "gemma")
    ids = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
    make_model("gemma3", **ids).save_pretrained(source)
    made = quantized(source, tmp_path / "out", wanted_of(method))
    assert divergence(source, made.out) < 0.5
    assert open_checkpoint(made.out).tensors["model.norm.weight"].type == GGMLType.BF16


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_rows_of_queries_are_in_the_order_of_folders(kind, source, folder, tmp_path):
    """To the nearest, a matrix is the same whichever file it comes from."""
    wanted = wanted_of("rtn", "gptq", bits=8, calibrate=False)
    made = quantized(source[kind], tmp_path / "out", wanted)
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        exact = open_checkpoint(folder).read(name).floats()
        ours = open_checkpoint(made.out).read(name).dequantize()
        np.testing.assert_allclose(ours, exact, atol=0.01)


# -- mixes ----------------------------------------------------------------------------------------


def mixed(source, out, method, target, **changes):
    return quantized(source, out, wanted_of(method, target_bpw=target, **changes))


@pytest.mark.parametrize(
    "method, target, kind",
    [
        ("gguf", 5.6, "folder"),
        ("gguf", 5.6, "gguf"),
        ("gptq", 7.0, "folder"),
        ("rtn", 7.0, "gguf"),
        ("awq", 7.0, "folder"),
    ],
)
def test_a_mix_has_the_size_that_was_asked_for(method, target, kind, source, tmp_path):
    made = mixed(source[kind], tmp_path / "out.gguf", method, target)
    assert target - 0.1 < made.bits_per_weight <= target
    assert made.format == ("gguf" if method == "gguf" else "compressed-tensors")
    assert made.choice is not None
    assert len({name for counts in made.choice.by_kind().values() for name in counts}) > 1
    assert 0 < divergence(source["folder"], made.out) < 1.0


def test_a_mix_is_better_than_one_type_of_its_size(folder, tmp_path):
    fixed = quantized(folder, tmp_path / "fixed.gguf", wanted_of("gguf", type="Q4_K_M"))
    made = mixed(folder, tmp_path / "mixed.gguf", "gguf", fixed.bits_per_weight)
    assert made.num_bytes <= fixed.num_bytes
    lost = divergence(folder, made.out)
    assert lost < divergence(folder, fixed.out)
    assert made.choice.divergence == pytest.approx(lost, rel=0.5)


def test_the_types_of_a_file_are_those_that_were_chosen(folder, tmp_path):
    made = mixed(folder, tmp_path / "m.gguf", "gguf", 5.6)
    reader = gguf.GGUFReader(made.out)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    for name, candidate in made.choice.chosen.items():
        kind = {"embed_tokens": "token_embd", "q_proj": "attn_q", "down_proj": "ffn_down"}
        of_file = kind.get(name.split(".")[-2])
        if of_file:
            layer = name.split(".")[2]
            place = of_file if of_file == "token_embd" else f"blk.{layer}.{of_file}"
            assert types[f"{place}.weight"] == candidate.name
    assert reader.fields["general.file_type"].contents() in (3, 8, 9, 25)


def test_a_folder_of_few_bits_and_of_floats(folder, tmp_path):
    """A config with several groups, and modules in none; and octavo reads it."""
    made = mixed(folder, tmp_path / "out", "rtn", 9.0, mix_bits=(4, 16))
    bits = {name: c.name for name, c in made.choice.chosen.items()}
    assert set(bits.values()) == {"4 bits", "16 bits"}
    checkpoint = open_checkpoint(made.out)
    for name, expected in bits.items():
        assert checkpoint.read(name).is_quantized == (expected == "4 bits")
    config = json.loads((made.out / "config.json").read_text())["quantization_config"]
    left_out = {name.removesuffix(".weight") for name, each in bits.items() if each == "16 bits"}
    assert set(config["ignore"]) == {*left_out, "lm_head"}


@pytest.mark.skipif(not library.runnable(), reason="no native library was built")
def test_the_kernels_run_a_mix(folder, tmp_path):
    for method in ("gguf", "rtn"):
        made = mixed(folder, tmp_path / f"{method}.gguf", method, 7.0)
        reference = scores(made.out, kernels="reference", dtype="float32")
        native = scores(made.out, kernels="native", activations="int16")
        assert np.abs(native - reference).mean() < 0.01


def test_targets_out_of_range(folder, tmp_path):
    for method, least in (("gguf", "4.58"), ("gptq", "4.29")):
        said = refusal(folder, tmp_path / "out", wanted_of(method, target_bpw=2.0))
        assert "no mix has 2 bits per weight" in said and f"target of {least}" in said
        assert "target of" in refusal(folder, tmp_path / "out", wanted_of(method, target_bpw=16.5))


@pytest.mark.parametrize(
    "method, changes, what",
    [
        ("gptq", {"bits": 4}, "leave --bits out"),
        ("gguf", {"type": "Q4_0"}, "leave --type out"),
        ("gptq", {"format": "gptq"}, "--format compressed-tensors has it"),
        ("nf4", {}, "method nf4 has one scheme"),
        ("rtn", {"calibrate": False}, "--target-bpw needs a text"),
        ("gguf", {"mix_bits": (4,)}, "--mix-bits is of folders"),
        ("rtn", {"mix_bits": (4, 9)}, r"2 to 8 and 16, not \[4, 9\]"),
    ],
)
def test_what_contradicts_a_target(method, changes, what):
    with pytest.raises(ConfigError, match=what):
        QuantizeRequest(method, target_bpw=6.0, **changes)


def test_bits_of_a_mix_need_a_target():
    with pytest.raises(ConfigError, match="--mix-bits needs --target-bpw"):
        QuantizeRequest("rtn", mix_bits=(4, 8))


# -- what is reported ----------------------------------------------------------------------------


def test_bits_per_weight_of_a_folder(folder, tmp_path):
    wanted = wanted_of("rtn", "compressed-tensors", group_size=32, calibrate=False)
    made = quantized(folder, tmp_path / "out", wanted)
    of_shapes = 14 * 2 * 64
    bits = NUM_LINEAR * (4 + 16 / 32) + of_shapes + (NUM_EMBEDDING + NUM_NORMS) * 16
    assert made.bits_per_weight == pytest.approx(
        bits / (NUM_LINEAR + NUM_EMBEDDING + NUM_NORMS), rel=1e-9
    )
    assert made.num_bytes == bits / 8 and made.elapsed_s > 0
    with safe_open(made.out / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert made.num_bytes == sum(tensor.nbytes for tensor in tensors)


def test_bits_per_weight_of_a_file(folder, tmp_path):
    made = quantized(folder, tmp_path / "m.gguf", wanted_of("gguf", type="Q8_0", calibrate=False))
    tensors = gguf.GGUFReader(made.out).tensors
    assert made.num_bytes == sum(tensor.n_bytes for tensor in tensors)
    bits = (NUM_LINEAR + NUM_EMBEDDING) * 8.5 + NUM_NORMS * 32
    assert made.bits_per_weight == pytest.approx(
        bits / (NUM_LINEAR + NUM_EMBEDDING + NUM_NORMS), rel=1e-9
    )


def test_what_was_trained_is_in_the_file(folder, tmp_path, monkeypatch):
    """Codes and scales, to the bit."""
    made, train = {}, job_module.train_model

    def train_model(*inputs, **settings):
        made.update(train(*inputs, **settings))
        return made

    monkeypatch.setattr(job_module, "train_model", train_model)
    wanted = wanted_of("qat", bits=2, symmetric=False, train_codes=True)
    out = quantized(folder, tmp_path / "out", wanted).out
    assert len(made) == 14
    for name, matrix in made.items():
        read = open_checkpoint(out).read(name)
        np.testing.assert_array_equal(read.dequantize(), matrix.dequantize().numpy(), name)


@pytest.mark.parametrize("method", ["rtn", "fp8", "gguf"])
def test_progress_ends_at_the_total(method, folder, tmp_path):
    seen = []
    wanted = wanted_of(method)
    quantized(folder, tmp_path / "out.gguf", wanted, progress=lambda *what: seen.append(what))
    assert seen[-1][0] == "quantizing" and seen[-1][1] == seen[-1][2]
    done = [done for what, done, _ in seen if what == "quantizing"]
    assert done == sorted(done)


# -- what is refused, and what is left behind --------------------------------------------------


def refusal(source, out, wanted) -> str:
    before = sorted(out.parent.iterdir())
    with pytest.raises(ConfigError) as caught:
        quantized(source, out, wanted)
    assert sorted(out.parent.iterdir()) == before
    return str(caught.value)


def test_quantizing_twice(folder, tmp_path):
    once = quantized(folder, tmp_path / "once", wanted_of("fp8")).out
    said = refusal(once, tmp_path / "twice", wanted_of("nf4"))
    assert "is quantized already (" in said and "--requantize" in said
    made = quantized(once, tmp_path / "twice", wanted_of("nf4", requantize=True))
    assert divergence(folder, made.out) < 1


def test_what_is_there_is_not_overwritten(folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file.gguf").write_text("mine")
    for name in ("full", "file.gguf"):
        assert "exists already" in refusal(folder, tmp_path / name, wanted_of("fp8"))
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "file.gguf").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert quantized(folder, tmp_path / "empty", wanted_of("fp8")).num_bytes


def test_groups_that_do_not_fit(folder, tiny_model, tmp_path):
    out = tmp_path / "out"
    said = refusal(folder, out, wanted_of("gptq", group_size=48))
    assert said.startswith("model.layers.0.self_attn.q_proj.weight: rows of 64 values")
    assert "multiple of 32" in refusal(tiny_model, out, wanted_of("gptq", group_size=16))
    assert "no blocks of 64" in refusal(tiny_model, out, wanted_of("nf4"))
    assert "8 bits, it has 4" in refusal(folder, out, wanted_of("rtn", "awq", bits=8))


def test_blocks_of_fp8_are_made_without_a_text():
    with pytest.raises(ConfigError, match="without a text"):
        QuantizeRequest("fp8", format="fp8", calibration_tokens=512)


def test_a_folder_is_no_place_for_a_file(folder, tmp_path):
    (tmp_path / "out").mkdir()
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ConfigError, match="is a folder"):
        make(checkpoint, load_tokenizer(folder), tmp_path / "out", wanted_of("gguf"))


def test_a_file_of_any_name_is_opened(folder, tmp_path):
    wanted = wanted_of("gguf", type="Q8_0", calibrate=False)
    made = make(open_checkpoint(folder), load_tokenizer(folder), tmp_path / "out", wanted)
    assert hub.resolve(str(made.out)) == made.out
    assert open_checkpoint(made.out).quantization == "gguf"


def test_a_text_that_is_too_short(folder, tmp_path):
    (tmp_path / "text.txt").write_text("short")
    wanted = wanted_of("gptq", calibration=tmp_path / "text.txt")
    assert "give a longer text" in refusal(folder, tmp_path / "out", wanted)


def test_training_tells_how_it_goes(folder, tmp_path):
    seen = []
    quantized(folder, tmp_path / "out", wanted_of("qat"), progress=lambda *what: seen.append(what))
    assert [(done, total) for what, done, total in seen if what == "quantizing"][-1] == (14, 14)
    steps = [each for each in seen if each[0].startswith("training, KL ")]
    assert seen[-2:] == steps and [each[1:] for each in steps] == [(1, 2), (2, 2)]


def test_only_one_method_trains():
    for changes in ({"train_tokens": 512}, {"train_codes": True}):
        with pytest.raises(ConfigError, match="method gptq does not train"):
            QuantizeRequest("gptq", **changes)


def test_a_text_of_one_window_is_too_short_to_train_on(folder, tmp_path):
    wanted = wanted_of("qat")
    wanted = replace(wanted, calibration_tokens=512)
    assert "give a longer text" in refusal(folder, tmp_path / "out", wanted)


@pytest.mark.parametrize("method", ["rtn", "fp8", "gguf"])
def test_an_interrupt_leaves_nothing(method, folder, tmp_path):
    def progress(what, done, total):
        if what == "quantizing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(folder, tmp_path / "out.gguf", wanted_of(method), progress=progress)
    assert list(tmp_path.iterdir()) == []
