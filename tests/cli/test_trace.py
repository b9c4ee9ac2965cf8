from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli import trace
from octavo.workload.traces import KINDS, read_trace

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
OCTAVO = """\
{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], "session_id": "a"}
{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [1, 3], "session_id": "a"}
"""


def run(*argv: str | Path) -> int:
    return cli.main(["trace", *(str(word) for word in argv)])


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text(OCTAVO)
    return path


def test_the_kinds_are_those_of_the_library() -> None:
    assert trace.KINDS == KINDS


def test_convert_to_octavos_own_lines(azure: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    assert run("convert", azure, out) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}: 2 requests as octavo\n"
    assert captured.err == ""
    assert read_trace(out) == read_trace(azure)


def test_convert_says_what_is_left_out(own: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.csv"
    assert run("convert", own, out, "--to", "vidur", "--limit", "1") == 0
    captured = capsys.readouterr()
    assert "vidur has no place for it: hash_ids, session_id" in captured.err
    assert out.read_text().splitlines()[1] == "0.0,600,5"
    assert len(out.read_text().splitlines()) == 2
    run("convert", own, out, "--to", "mooncake", "--from", "octavo", "--json")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "output": str(out),
        "kind": "mooncake",
        "count": 2,
        "lost": ["session_id"],
    }


def test_convert_in_place(azure: Path, capsys) -> None:
    before = read_trace(azure)
    run("convert", azure, azure, "--to", "splitwise")
    assert read_trace(azure, "splitwise") == before


def test_failures_of_burstgpt(tmp_path: Path, capsys) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens\n1,m,5,0\n2,m,6,7\n")
    counts = []
    for flags in ([], ["--keep-failures"]):
        run("stats", path, "--json", *flags)
        counts.append(json.loads(capsys.readouterr().out)["count"])
    assert counts == [1, 2]


def test_stats(own: Path, capsys) -> None:
    assert run("stats", own) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["requests", "2"]
    assert lines[1].split() == ["span", "1.5", "s"]
    assert lines[2].split() == ["rate", "0.667", "requests/s"]
    assert "shared prefixes    39.4% of the prompt tokens" in lines
    assert any("prompt" in line and "650" in line and "700" in line for line in lines[6:])


def test_stats_json(own: Path, capsys) -> None:
    run("stats", own, "--json")
    document = json.loads(capsys.readouterr().out)
    assert (document["count"], document["span_s"], document["num_sessions"]) == (2, 1.5, 1)
    assert document["input_len"]["mean"] == 650
    assert document["shared_prefix_share"] == pytest.approx(512 / 1300)


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["convert", "azure.csv", "out.csv"], 2, "which kind of CSV with --to azure"),
        (["stats", "azure.csv", "--limit", "0"], 2, "--limit is 0, and must be 1 or more"),
        (["convert", "azure.csv", "out", "--to", "weka"], 2, "invalid choice: 'weka'"),
        (["stats"], 2, "the following arguments are required: IN"),
        ([], 2, "the following arguments are required: COMMAND"),
        (["stats", "nowhere"], 1, "nowhere: cannot be read: No such file or directory"),
        (["stats", "azure.csv", "--from", "vidur"], 1, "azure.csv:1: the first line has no column"),
    ],
)
def test_wrong_use(azure: Path, argv, status: int, message: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(azure.parent)
    assert run(*argv) == status
    assert message in capsys.readouterr().err
    assert list(azure.parent.iterdir()) == [azure]


def test_help_has_examples(capsys) -> None:
    for command in ("convert", "stats"):
        assert run(command, "--help") == 0
        assert f"octavo trace {command} " in capsys.readouterr().out.split("examples:")[1]
