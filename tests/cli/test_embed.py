"""``octavo embed``: vectors of texts, as JSON and as lines."""

from __future__ import annotations

import io
import json

import pytest
from tiny_encoders import make_encoder

from octavo import LLM
from octavo.cli import main


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embed")
    make_encoder("bert", folder)
    return folder


def test_json_has_the_contracts_keys(encoder, capsys):
    texts = ["a cat", "dog"]
    assert main(["embed", str(encoder), "--text", *texts, "--dimensions", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"model", "dimensions", "embeddings", "tokens"}
    assert (document["model"], document["dimensions"]) == (str(encoder), 5)
    assert document["tokens"] == [7, 5]
    with LLM(str(encoder)) as llm:
        whole = [output.outputs.embedding for output in llm.embed(texts)]
    for short, long in zip(document["embeddings"], whole, strict=True):
        length = sum(value**2 for value in long[:5]) ** 0.5
        assert short == pytest.approx([value / length for value in long[:5]], abs=1e-6)


def test_lines_of_stdin_are_texts(encoder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert main(["embed", str(encoder), "-", "c", "--no-normalize"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(json.loads(line)) for line in lines] == [64] * 3


def test_a_text_that_is_too_long_fails_alone(encoder, capsys):
    assert main(["embed", str(encoder), "a", "b" * 200]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1] == "null" and "202 tokens" in captured.err
    assert main(["embed", str(encoder), "b" * 200, "--truncate"]) == 0
    assert main(["embed", str(encoder)]) == 2


@pytest.mark.parametrize("command", ["build", "generate", "bench latency", "bench throughput"])
def test_what_generates_says_that_a_model_does_not(encoder, capsys, tmp_path, command):
    short = ["--input-len", "8", "--output-len", "2"]
    more = {"build": [str(tmp_path / "out")], "generate": ["--prompt", "a"]}.get(command, short)
    assert main([*command.split(), str(encoder), *more]) in (1, 2)
    err = capsys.readouterr().err
    assert "pools texts to vectors or scores" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()
