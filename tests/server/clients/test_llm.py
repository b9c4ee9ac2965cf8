"""The ``llm`` tool against a live server, as its users set it up: a YAML file and a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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
- model_id: octavo-tools
  model_name: qwen2.5-coder-0.5b
  api_base: {coder_url}
  supports_tools: true
  supports_schema: true
"""
QUESTION = "What is the capital of Japan?"
FUNCTIONS = """
def get_weather(city: str) -> str:
    return f"It is sunny in {city}."
"""
LONGER = ["-o", "temperature", "0", "-o", "max_tokens", "80"]
GREEDY = ["-o", "temperature", "0", "-o", "max_tokens", "8"]


@pytest.fixture(scope="module")
def folder(server, coder_server, tmp_path_factory) -> Path:
    pytest.importorskip("llm")
    folder = tmp_path_factory.mktemp("llm")
    models = MODELS.format(url=server.base_url, coder_url=coder_server.base_url)
    (folder / "extra-openai-models.yaml").write_text(models)
    return folder


# As the tool would run each, but all in one process, which imports it once.
RUN = """
import json, sys
from click.testing import CliRunner
from llm.cli import cli
done = {}
for name, words in json.loads(sys.argv[1]).items():
    result = CliRunner().invoke(cli, words)
    done[name] = result.exit_code, result.stdout, result.stderr
print(json.dumps(done))
"""
COMMANDS = {
    "stream": ["-m", "octavo", QUESTION, *GREEDY],
    "whole": ["-m", "octavo", "--no-stream", QUESTION, *GREEDY, "-o", "seed", "1"],
    # The tool keeps a log, and goes on where it was.
    "further": ["-c", "And of France?", "-s", "Be brief.", *GREEDY],
    "log": ["logs", "--json", "-n", "2"],
    "completion": ["-m", "octavo-text", "The capital of France is", *GREEDY],
    "lost": ["-m", "octavo-lost", QUESTION],
    # The chain ends at its limit: a small model may call its tool again and again.
    "tools": [
        *("-m", "octavo-tools", "What is the weather in Paris?", "--functions", FUNCTIONS),
        *("--td", "--chain-limit", "2", *LONGER),
    ],
    "schema": ["-m", "octavo-tools", "Paris is in France.", "--schema", "name, country", *LONGER],
}


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def done(folder) -> dict[str, Done]:
    result = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(COMMANDS)],
        env={**os.environ, "LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return {name: Done(*each) for name, each in json.loads(result.stdout).items()}


def test_all_but_one_end_well(done) -> None:
    assert {name for name, each in done.items() if each.status != 0} - {"tools"} == {"lost"}


def test_chat(done) -> None:
    assert "Tokyo" in done["stream"].out and done["whole"].out == done["stream"].out
    log = json.loads(done["log"].out)
    assert [entry["prompt"] for entry in log] == [QUESTION, "And of France?"]
    assert log[0]["response"] == done["stream"].out.removesuffix("\n") and log[1]["response"]


def test_completions(done) -> None:
    assert "Paris" in done["completion"].out


def test_tools(done) -> None:
    _, out, err = done["tools"]
    assert "get_weather({'city': 'Paris'})" in err and "It is sunny in Paris." in err
    assert set(json.loads(done["schema"].out)) == {"name", "country"}


def test_errors_are_said(done) -> None:
    status, _, err = done["lost"]
    assert status == 1 and "gpt-5" in err and "does not exist" in err
