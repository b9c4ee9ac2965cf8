"""Commands with a real engine: a tiny random model in this process, SmolLM2 in one of its own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import cli

SMALL = ["--num-blocks", "32", "--max-num-seqs", "4"]


def check_shape(document: dict, num_prompts: int, n: int, max_tokens: int) -> None:
    """The JSON of ``octavo generate``, type by type."""
    assert set(document) == {"model", "outputs", "engine"}
    engine = document["engine"]
    assert set(engine) == {
        *("device", "dtype", "kernels", "isa", "weights_bytes", "kv_blocks", "block_size")
    }
    assert engine["weights_bytes"] > 0 and engine["kv_blocks"] > 0 and engine["block_size"] == 16
    assert len(document["outputs"]) == num_prompts
    for output in document["outputs"]:
        assert set(output) == {"prompt", "prompt_token_ids", "outputs", "metrics"}
        assert isinstance(output["prompt"], str)
        assert all(isinstance(token_id, int) for token_id in output["prompt_token_ids"])
        assert [completion["index"] for completion in output["outputs"]] == list(range(n))
        for completion in output["outputs"]:
            assert isinstance(completion["text"], str)
            assert 1 <= len(completion["token_ids"]) <= max_tokens
            assert completion["finish_reason"] in ("stop", "length")
        metrics = output["metrics"]
        assert 0 < metrics["ttft_ms"] <= metrics["e2e_ms"]
        assert metrics["prefill_tps"] > 0 and metrics["num_cached_tokens"] >= 0


def test_generate_json(tiny_model: Path, capsys) -> None:
    argv = ["generate", str(tiny_model), "--prompt", "Hi", "--prompt", "Ho", "--n", "2", "--seed=1"]
    argv += ["--max-tokens", "5", "--logprobs", "2", "--json", *SMALL]
    assert cli.main(argv) == 0
    first = json.loads(capsys.readouterr().out)
    check_shape(first, num_prompts=2, n=2, max_tokens=5)
    for position in first["outputs"][0]["outputs"][0]["logprobs"]:
        assert set(position) == {"token_id", "token", "logprob", "rank", "top"}
        assert len(position["top"]) == 2 and position["logprob"] <= 0
        assert position["top"][0]["logprob"] >= position["top"][1]["logprob"]

    assert cli.main(argv) == 0
    second = json.loads(capsys.readouterr().out)
    assert [o["outputs"] for o in first["outputs"]] == [o["outputs"] for o in second["outputs"]]


def test_streamed_text_is_that_of_the_json(tiny_model: Path, capsys) -> None:
    argv = ["generate", str(tiny_model), "--prompt", "Hi", "--max-tokens", "8", "--seed", "3"]
    assert cli.main([*argv, *SMALL]) == 0
    streamed = capsys.readouterr()
    assert cli.main([*argv, *SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert streamed.out == document["outputs"][0]["outputs"][0]["text"] + "\n"
    assert "8 output tokens (length), TTFT " in streamed.err


def test_raw_and_chat_differ_by_the_template(tiny_model: Path, capsys) -> None:
    prompts, token_ids = [], {}
    for flag in ("--raw", "--chat"):
        argv = ["generate", str(tiny_model), flag, "--prompt", "Hi", "--max-tokens", "1", "--json"]
        assert cli.main([*argv, *SMALL]) == 0
        (output,) = json.loads(capsys.readouterr().out)["outputs"]
        prompts.append(output["prompt"])
        token_ids[flag] = output["prompt_token_ids"]
    assert prompts == ["Hi", "Hi"]  # what the user wrote, in either case
    assert token_ids["--chat"] == [258, *token_ids["--raw"], 256, 259]


def test_chat_reuses_the_conversation_so_far(tiny_model: Path, capsys, monkeypatch) -> None:
    lines = "Hello to you, and a long line it is\n/stats\nMore\n/stats\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert cli.main(["chat", str(tiny_model), "--max-tokens", "4", "--seed", "1", *SMALL]) == 0
    first, second = [line for line in capsys.readouterr().out.splitlines() if "TTFT" in line]
    assert "cached" not in first and "cached" in second


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--raw", "--prompt", ""], "empty"),
        (["--prompt", "x" * 4000], "max_model_len"),
        (["--prompt", "x", "--logit-bias", "99999=1"], "vocabulary"),
        (["--prompt", "x", "--max-model-len", "100000"], "max_model_len"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tiny_model: Path, capsys, flags: list[str], words: str
) -> None:
    assert cli.main(["generate", str(tiny_model), *SMALL, *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: error: ") and captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.slow
@pytest.mark.network
def test_smollm2_answers(smollm2_gguf: Path) -> None:
    command = [sys.executable, "-m", "octavo", "generate", "--prompt", "What is 1+1?", "--json"]
    command += ["--temperature", "0", "--max-tokens", "12"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    check_shape(document, num_prompts=1, n=1, max_tokens=12)
    assert document["model"] == "smollm2-135m"
    assert "2" in document["outputs"][0]["outputs"][0]["text"]
