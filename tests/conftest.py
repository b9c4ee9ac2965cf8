from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from octavo.base.gc_pause import no_collections
from octavo.system import machine

pytest_plugins = ["compiled_ahead", "lanes", "own_warnings", "thinning"]

machine.keep_openmp_patient()  # before any test imports torch
if "PYTEST_XDIST_WORKER" in os.environ:  # processes share the cores, and so do all they start
    share = machine.cpu().usable_cores // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

# The same examples every time, and no time limits of their own on a machine that does other things.
hypothesis.settings.register_profile("octavo", deadline=None, derandomize=True)
hypothesis.settings.load_profile("octavo")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: the garbage collector need not look at it,
    neither meanwhile nor from then on."""
    with no_collections():
        result = yield
        gc.freeze()
    return result


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="with -m long: record what transformers answers anew"
    )


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 260,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 256,
    "bos_token_id": 257,
}


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer.json in which a token is a byte; 256 to 259 are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<eos>", "<bos>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tiny_model(folder: Path, seed: int = 0, **changes) -> Path:
    """A Llama of two layers with random weights, as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    config = {**TINY_CONFIG, **changes}
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (q_size, hidden),
            layer + "self_attn.k_proj.weight": (kv_size, hidden),
            layer + "self_attn.v_proj.weight": (kv_size, hidden),
            layer + "self_attn.o_proj.weight": (hidden, q_size),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    tensors = {
        # Large enough that the answers differ from prompt to prompt, and are no ties.
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 0.1)
        + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)
    return folder


def write_calm_model(folder: Path, share: float, **changes) -> Path:
    """The same, with ``share`` of the queries and of what its layers add: they attend to much and
    add little, as those of trained models do, and errors of one are not blown up by the next."""
    from safetensors.torch import load_file, save_file

    path = write_tiny_model(folder, **changes) / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("q_proj.weight", "o_proj.weight", "down_proj.weight")):
            tensors[name] *= share
    save_file(tensors, path)
    return folder


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts this process and those that it starts. Without this it would not where a
    shell has put the tests in the background: they, and all that they start, then ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is found to be as fast after each measurement as before it. To probe it takes
    seconds of all cores; bench/test_noise.py does for all."""
    from octavo.bench import record
    from octavo.bench.noise import NoiseProbe

    monkeypatch.setattr(record, "probe_machine", lambda threads: NoiseProbe(10.0, 100.0))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The folder of a tiny random Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_hf(tiny_model, tmp_path_factory):
    """``tiny_hf(name)``: the folder of one of the CASES of transformers, with a tokenizer; more
    arguments are fields of its config."""
    from tiny_transformers import make_model

    @cache
    def make(name: str, **more: Any) -> Path:
        folder = tmp_path_factory.mktemp("transformers") / name
        ids = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
        make_model(name, **ids, **more).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tiny_model / file, folder / file)
        return folder

    return make


@pytest.fixture(scope="session")
def runner_of() -> Callable[[Any], Any]:
    """The runner inside an engine, for the tests that take it apart; others ask its probe."""
    return lambda engine: engine.executor.runner


@pytest.fixture(scope="session")
def byte_tokenizer(tiny_model) -> Any:
    """A token is a byte, though not that of its number; 256 is <eos>, 257 <bos>."""
    from octavo.text.folder_tokenizer import load_folder_tokenizer

    return load_folder_tokenizer(tiny_model)


@pytest.fixture
def hash_engine(byte_tokenizer) -> Callable[..., Any]:
    """Makes a text engine over the hash model, which knows 97 tokens and no end of text;
    ``around`` its executor there may be another; keyword arguments are the scheduler's."""
    from hash_model import HashExecutor

    from octavo.assembly.engine import build_engine
    from octavo.core.scheduler import SchedulerConfig
    from octavo.serving.text_engine import TextEngine
    from octavo.settings.engine import CacheConfig, EngineConfig

    def create(around: Any = None, meter: Any = None, **limits: Any) -> TextEngine:
        limits = {"max_model_len": 256, "max_num_seqs": 8, **limits}
        scheduler, cache = SchedulerConfig(**limits), CacheConfig(4, 512, "hash", True)
        config = EngineConfig("hash", "cpu", "hash", 0, "continuous", cache, scheduler)
        executor: Any = HashExecutor(cache.num_blocks, cache.block_size, 97)
        executor = executor if around is None else around(executor)
        return TextEngine(build_engine(config, executor, meter=meter), byte_tokenizer, 97, ())

    return create


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, fetched on first use."""
    from octavo import hub

    return hub.pull("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, fetched on first use."""
    from octavo import hub

    return hub.pull("gemma3-270m", accept_terms=True)
