"""What octavo does not run is refused in words that say what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import main

SENTENCE = "it is an encoder, which makes embeddings of texts and generates none"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 384}
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
