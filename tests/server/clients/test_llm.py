"""The ``llm`` tool against a live server, as its users set it up: a YAML file and a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

MODELS = """\
- model_id: octavo
  model_name: smollm2-135m
  api_base: {url}
- model_id: octavo-text
  model_name: smollm2-135m
  api_base: {url}
  completion: true
- model_id: octavo-lost
  model_name: gpt-5
  api_base: {url}
"""
QUESTION = "What is the capital of Japan?"
GREEDY = ["-o", "temperature", "0", "-o", "max_tokens", "8"]


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory) -> Path:
    pytest.importorskip("llm")
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(url=server.base_url))
    return folder


def run_llm(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": ""}
    return subprocess.run(
        [sys.executable, "-m", "llm", *args],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def ask(folder: Path, *args: str) -> str:
    result = run_llm(folder, *args)
    assert result.returncode == 0, result.stderr
    return result.stdout.removesuffix("\n")


def test_chat(folder) -> None:
    stream = ask(folder, "-m", "octavo", QUESTION, *GREEDY)
    assert "Tokyo" in stream
    whole = ask(folder, "-m", "octavo", "--no-stream", QUESTION, *GREEDY, "-o", "seed", "1")
    assert whole == stream
    # The tool keeps a log, and goes on where it was.
    ask(folder, "-c", "And of France?", "-s", "Be brief.", *GREEDY)
    log = json.loads(ask(folder, "logs", "--json", "-n", "2"))
    assert [entry["prompt"] for entry in log] == [QUESTION, "And of France?"]
    assert log[0]["response"] == stream and log[1]["response"]


def test_completions(folder) -> None:
    assert "Paris" in ask(folder, "-m", "octavo-text", "The capital of France is", *GREEDY)


def test_errors_are_said(folder) -> None:
    result = run_llm(folder, "-m", "octavo-lost", QUESTION)
    assert result.returncode == 1 and "gpt-5" in result.stderr and "does not exist" in result.stderr
