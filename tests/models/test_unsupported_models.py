"""What octavo does not run is refused in words that say what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.cli import main
from octavo.models.config_gguf import config_from_gguf
from octavo.text.folder_tokenizer import load_folder_tokenizer

SENTENCE = "it is an encoder that octavo does not run yet"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    config = {"architectures": ["DistilBertModel"], "model_type": "distilbert", "hidden_size": 384}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")  # it is not looked at
    return tmp_path


@pytest.mark.parametrize("impl", ["auto", "octavo", "transformers"])
@pytest.mark.parametrize(
    "command", [("generate", "--prompt", "hello"), ("bench", "latency")], ids="".join
)
def test_an_embedding_model_is_not_asked_to_generate(
    encoder: Path, command: tuple[str, ...], impl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command, str(encoder)] if command[0] == "bench" else [command[0], str(encoder)]
    words += command[1:] if command[0] == "generate" else ()
    assert main([*words, "--model-impl", impl]) == 1
    error = capsys.readouterr().err
    assert SENTENCE in error and str(encoder) in error and "Traceback" not in error


def test_doctor_says_the_same(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(encoder)]) == 1
    assert SENTENCE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("architecture", "kind", "feature"),
    [
        ("Gemma4ForConditionalGeneration", "gemma4", "share keys and values"),
        ("Gemma3nForConditionalGeneration", "gemma3n", "AltUp"),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5", "Gated DeltaNet"),
        ("Llama4ForConditionalGeneration", "llama4", "attention in chunks"),
        ("NemotronHForCausalLM", "nemotron_h", "Mamba-2"),
        ("GlmMoeDsaForCausalLM", "glm_moe_dsa", "sparse attention"),
        ("MambaForCausalLM", "mamba", "Mamba"),
    ],
)
@pytest.mark.parametrize("impl", ["auto", "octavo"])
def test_a_refusal_names_the_feature(
    architecture: str,
    kind: str,
    feature: str,
    impl: str,
    encoder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100}
    config = {"architectures": [architecture], **text}
    (encoder / "config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros(1, np.float32)}, encoder / "model.safetensors")
    assert main(["generate", str(encoder), "--prompt", "hi", "--model-impl", impl]) == 1
    error = capsys.readouterr().err
    assert feature in error and "Traceback" not in error


def test_gguf_files_too() -> None:
    with pytest.raises(UnsupportedModelError, match="AltUp"):
        config_from_gguf({"general.architecture": "gemma3n"}, {}, path=Path("a.gguf"))
    with pytest.raises(UnsupportedModelError, match="an encoder"):
        config_from_gguf({"general.architecture": "nomic-bert"}, {}, path=Path("a.gguf"))


def test_a_vocabulary_of_tiktoken_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tiktoken.model").write_bytes(b"IQ== 0\n")
    with pytest.raises(ModelFileError, match="tiktoken.*tokenizer.json of the same model"):
        load_folder_tokenizer(tmp_path)
