"""``octavo bench structured`` from end to end, on a tiny model."""

from __future__ import annotations

import json
import sys

import pytest

from octavo.bench.structured import study, validity_study
from octavo.bench.structured.llama_server import LlamaAnswer
from octavo.cli import main

SCHEMA = {"enum": ["a", "bc", 12]}


@pytest.fixture
def bench(capsys, tiny_model, monkeypatch):
    """``bench("--json")``: status, stdout and stderr. Schemas are small, as the model is."""
    monkeypatch.setattr(study, "random_schema", lambda number: SCHEMA)
    monkeypatch.setattr(study, "record_schema", lambda number: SCHEMA)

    def run(*arguments: object) -> tuple[int, str, str]:
        small = ("--schemas", 3, "--streams", 2, "--max-tokens", 30, "--repeat", 2, "--threads", 1)
        status = main(["bench", "structured", str(tiny_model), *map(str, (*small, *arguments))])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_rows_as_json(bench):
    status, out, _ = bench("--json")
    assert status == 0
    rows = {row["kind"]: row for row in json.loads(out)["rows"]}
    assert list(rows) == [
        *("random logits", "model", "one stream", "2 streams", "forced tokens"),
    ]
    assert [row["schemas"] for row in rows.values()] == [3, 1, 2, 4, 2]
    for row in rows.values():
        assert row["refused"] == 0 and row["valid"] == row["finished"] == row["schemas"]
        if row["kind"] != "2 streams":  # made together, their masks have no times
            assert row["mask_us"].keys() == {"median", "p99", "p999"}
        assert row["compile_ms"].keys() == {"median", "p99"}
    assert rows["one stream"]["plain_decode_tps"] > 0 and rows["model"]["plain_decode_tps"] is None


def test_a_table_for_people(bench):
    status, out, _ = bench()
    assert status == 0
    (line,) = (line for line in out.splitlines() if line.strip().startswith("2 streams"))
    assert line.strip().endswith("×")


def test_answers_to_schemas_of_all_keywords_are_checked(bench, monkeypatch):
    schemas = [SCHEMA, {"type": "integer"}, {"not": {"pattern": "a"}}, {"type": "string"}]
    monkeypatch.setattr(
        validity_study, "varied_schema", lambda number: schemas[number % len(schemas)]
    )
    status, out, _ = bench("--valid", 8, "--seed", 4, "--json")
    rows = json.loads(out)["rows"]
    assert status == 0 and [row["kind"] for row in rows] == ["random logits", "model"]
    for row in rows:
        assert row["schemas"] == 8 and row["refused"] == {"not": 2} and row["failures"] == []
        assert row["finished"] + row["cut"] == 6 and row["finished"] >= 2
        assert (row["valid"], row["completed"]) == (row["finished"], row["cut"])
    assert bench("--valid", 1, "--llama-server", "http://peer")[0] == 2
    _, table, _ = bench("--valid", 4)
    assert "not 1" in table and "completed" in table


def test_an_answer_that_is_not_valid_is_shown(bench, monkeypatch):
    monkeypatch.setattr(validity_study, "varied_schema", lambda number: SCHEMA)
    monkeypatch.setattr(validity_study.Validity, "is_valid", lambda self, text, schema: False)
    status, out, err = bench("--valid", 1, "--json")
    assert status == 1 and "not all answers are valid" in err
    (failure,) = json.loads(out)["rows"][0]["failures"]
    assert json.loads(failure["schema"]) == SCHEMA


def test_schemas_that_are_refused_are_counted(bench, monkeypatch):
    monkeypatch.setattr(study, "random_schema", lambda number: {"type": "nonsense"})
    status, out, _ = bench("--json")
    assert status == 0
    first = json.loads(out)["rows"][0]
    assert (first["schemas"], first["refused"], first["finished"]) == (3, 3, 0)
    assert first["mask_us"] is None and first["decode_tps"] is None


def test_a_peer_answers_too(bench, monkeypatch):
    class Peer:
        def __init__(self, url):
            assert url == "http://peer"

        def answers(self, questions):
            return [self.answer(*question) for question in questions]

        def answer(self, prompt, max_tokens, schema):
            assert "JSON schema" in prompt and (schema is None or schema == SCHEMA)
            return LlamaAnswer('"bc"', True, 4, 20.0 if schema is None else 10.0)

    monkeypatch.setattr("octavo.bench.structured.llama_server.LlamaServer", Peer)
    _, out, _ = bench("--json", "--llama-server", "http://peer")
    one, two = json.loads(out)["rows"][-2:]
    assert (one["kind"], two["kind"]) == ("llama-server, one stream", "llama-server, 2 streams")
    assert (one["valid"], two["valid"]) == (2, 4)
    assert (one["decode_tps"], one["plain_decode_tps"]) == (10.0, 20.0)
    assert (two["decode_tps"], two["plain_decode_tps"]) == (20.0, 40.0)
    assert two["ratio"] == {"median": 0.5, "min": 0.5, "max": 0.5}


def test_without_the_package_that_checks_it_says_what_to_install(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    status, _, err = bench()
    assert status != 0 and "octavo[schemas]" in err
