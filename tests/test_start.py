"""What octavo does without: PyTorch, wherever native kernels run the model.

Every process here finds a package ``torch`` before the real one, which is as good as none: to
import it fails as if it were not installed, and leaves a note.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from live_server import LiveServer

from octavo.base.errors import ConfigError
from octavo.kernels.cpu import library
from octavo.models.gguf_writer import TensorToWrite, write_gguf
from octavo.models.llama import GGUF_LAYER
from octavo.quantization.ggml_types import GGMLType

needs_native = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

NO_TORCH = """\
import os
with open(os.environ["TORCH_IMPORTS"], "a") as notes:
    notes.write("x")
raise ModuleNotFoundError("No module named 'torch'", name="torch")
"""


@pytest.fixture
def without_torch(tmp_path, monkeypatch) -> Path:
    """For processes without torch: a file with a letter for each time that it was asked for."""
    package, notes = tmp_path / "path" / "torch", tmp_path / "imports of torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(NO_TORCH)
    notes.touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), *sys.path]))
    monkeypatch.setenv("TORCH_IMPORTS", str(notes))
    return notes


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model, tmp_path_factory) -> Path:
    """As the tiny model, but a GGUF file with other random weights; a token is a byte."""
    from tokenizers import pre_tokenizers

    config = json.loads((tiny_model / "config.json").read_text())
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    rng = np.random.default_rng(0)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"token_embd": (config["vocab_size"], hidden), "output_norm": (hidden,)}
    of_layer = {
        "attn_q": (q, hidden),
        **dict.fromkeys(("attn_k", "attn_v"), (kv, hidden)),
        "attn_output": (hidden, q),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, hidden)),
        "ffn_down": (hidden, inner),
        **dict.fromkeys(("attn_norm", "ffn_norm"), (hidden,)),
    }
    assert set(of_layer) < set(GGUF_LAYER)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    tensors = []
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32) * 0.3 + (len(shape) == 1)
        tensors.append(TensorToWrite(f"{name}.weight", shape, GGMLType.F32, [values.view("u1")]))
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": head,
        "llama.attention.value_length": head,
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [
            *sorted(pre_tokenizers.ByteLevel.alphabet()),
            *("<eos>", "<bos>", "<|user|>", "<|assistant|>"),
        ],
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3] * 4, dtype=np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.chat_template": settings["chat_template"],
    }
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, metadata, tensors)
    return path


@pytest.fixture(scope="module")
def tiny_engine(tiny_gguf, tmp_path_factory) -> Path:
    """The tiny GGUF as an engine folder."""
    from octavo.settings.engine import EngineArgs
    from octavo.sources.engine_folder.writer import build_engine_folder

    out = tmp_path_factory.mktemp("engines") / "tiny-engine"
    build_engine_folder(EngineArgs.from_kwargs(str(tiny_gguf)), out)
    return out


MODELS = {
    "gguf": "tiny_gguf",
    "safetensors": "tiny_model",
    "smollm2": "smollm2_gguf",
    "engine": "tiny_engine",
}


@pytest.fixture(params=MODELS)
def model(request) -> Path:
    return request.getfixturevalue(MODELS[request.param])


def python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


ANSWERS = """
import sys
from octavo import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    assert llm.engine_info()["kernels"] == "native"
    for way in (
        dict(temperature=0),
        dict(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=1),
        dict(temperature=0.8, typical_p=0.7),
        dict(logprobs=3, prompt_logprobs=2),
    ):
        params = SamplingParams(max_tokens=12, repetition_penalty=1.1, ignore_eos=True, **way)
        (output,) = llm.generate("Hello, this is", params)
        assert len(output.outputs[0].token_ids) == 12
        assert len(output.outputs[0].logprobs or ()) == (12 if params.logprobs else 0)
        assert bool(output.prompt_logprobs) == bool(params.prompt_logprobs)
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], params)
        assert len(output.outputs[0].token_ids) == 12
assert "torch" not in sys.modules
"""


@needs_native
def test_answers_take_no_torch(model, without_torch):
    done = python(ANSWERS, model)
    assert done.returncode == 0, done.stderr
    assert without_torch.read_text() == ""


@needs_native
@pytest.mark.parametrize("flags", [["--temperature", "0"], ["--temperature", "0.7", "--json"]])
def test_nor_do_those_of_the_command(tiny_gguf, without_torch, flags):
    command = [sys.executable, "-m", "octavo", "generate", str(tiny_gguf), "--chat"]
    command += ["--prompt", "Hello", "--max-tokens", "8", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert without_torch.read_text() == ""


@needs_native
@pytest.mark.parametrize("name", ["tiny_gguf", "tiny_engine"])
def test_nor_do_those_of_a_server(request, name, without_torch):
    """In none of its processes, whatever a request asks for."""
    with LiveServer(request.getfixturevalue(name)) as server:
        body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0.7}
        answer = server.fetch("/v1/completions", body)
        assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] > 0
        answer = server.fetch("/v1/completions", {**body, "logprobs": 1, "typical_p": 0.5})
        assert answer.status == 200
        assert len(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) > 0
    assert without_torch.read_text() == ""


# A command on a machine that is not probed, which would take longer than all the rest.
MEASURE = """
import sys
from octavo.bench import noise, record
from octavo.cli import main
record.probe_machine = lambda threads: noise.NoiseProbe(10.0, 100.0)
sys.exit(main(sys.argv[1:]))
"""


@needs_native
@pytest.mark.parametrize(
    "command",
    [
        ["perplexity", "--ctx", "64", "--text", "{text}"],
        ["bench", "latency", "--input-len", "16", "--output-len", "8", "--repeat", "1"],
        ["bench", "throughput", "--num-prompts", "4", "--input-len", "16", "--output-len", "8"],
    ],
    ids=" ".join,
)
def test_nor_do_measurements(tiny_gguf, without_torch, tmp_path, command):
    text = tmp_path / "text"
    text.write_text("So shaken as we are, so wan with care. " * 10)
    words = [word.format(text=text) for word in command]
    done = python(MEASURE, *words, tiny_gguf, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert without_torch.read_text() == ""


def test_a_doctor_says_that_it_is_not_there(without_torch, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "doctor", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "No module named 'torch'" in json.loads(done.stdout)["cuda"]["reason"]


@pytest.mark.parametrize("settings", [{"kernels": "reference"}, {"device": "cuda"}, {}])
def test_models_that_only_torch_can_run_say_how_to_get_it(
    tiny_gguf, without_torch, monkeypatch, settings
):
    monkeypatch.setenv("OCTAVO_ISA", "none")
    code = "import json, sys; from octavo import LLM; LLM(sys.argv[1], **json.loads(sys.argv[2]))"
    done = python(code, tiny_gguf, json.dumps(settings))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "MissingPackageError" in last
    assert "pip install 'octavo[torch]'" in last


def test_a_gpu_is_not_used_without_torch(tiny_gguf, monkeypatch, caplog):
    """Unless it was asked for, which is an error: see above."""
    from octavo.serving import load

    monkeypatch.setitem(sys.modules, "torch", None)  # to import it is then a ModuleNotFoundError
    monkeypatch.setattr(load, "has_gpu_driver", lambda: True)
    assert load._choose_device("auto") == "cpu"
    assert "pip install 'octavo[torch]'" in caplog.text


@pytest.mark.parametrize(
    ("asked", "why_not", "chosen"),
    [("auto", None, "cuda"), ("cuda", None, "cuda"), ("cuda:1", None, "cuda:1")],
)
def test_a_gpu_is_chosen_by_its_number(asked, why_not, chosen, monkeypatch):
    from octavo.serving import load
    from octavo.system import gpu_software

    monkeypatch.setattr(load, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpu_software, "why_no_gpu", lambda device: why_not)
    assert load._choose_device(asked) == chosen


def test_a_gpu_that_cannot_be_used_is_told(monkeypatch, caplog):
    """The start goes on without it, unless it was asked for."""
    from octavo.serving import load
    from octavo.system import gpu_software

    monkeypatch.setattr(load, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(gpu_software, "why_no_gpu", lambda device: "update the driver")
    assert load._choose_device("auto") == "cpu"
    assert "the GPU of this machine is not used: update the driver" in caplog.text
    with pytest.raises(ConfigError, match="device cuda:3: update the driver"):
        load._choose_device("cuda:3")


IMPORTS = """
import sys
from octavo import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    llm.generate("Hello", SamplingParams(max_tokens=4, temperature=0))
print(*sys.modules)
"""


@needs_native
def test_an_engine_folder_brings_nothing_of_models_and_checkpoints(tiny_engine):
    done = python(IMPORTS, tiny_engine)
    assert done.returncode == 0, done.stderr
    models = {name for name in done.stdout.split() if name.startswith("octavo.models.")}
    needed = ("config", "footprint", "kv_groups", "pooling", "registry")
    assert models == {f"octavo.models.{name}" for name in needed}
