"""``octavo bench spec`` from end to end, on a tiny model and with a drafter that repeats itself."""

from __future__ import annotations

import json

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.offline import spec
from octavo.cli import main
from octavo.core.batch import Draft
from octavo.speculation.drafter import TextDrafter

FIELDS = {
    *("method", "workload", "batch_size", "decode_tps", "base_decode_tps", "speedup"),
    *("mean_accepted_length", "acceptance_rate", "accepted_by_position", "break_even_batch"),
}


class Again:
    """Drafts the last token again."""

    max_tokens = 2
    seconds = 0.0

    def wants(self, request):
        return True

    def propose(self, openings, batch_tokens):
        return {
            request.request_id: Draft.chain([request.token_ids[-1]] * room)
            for request, room in openings
        }

    def observe(self, request, draft, num_accepted):
        pass

    def observe_step(self, batch, seconds):
        pass

    def forget(self, request):
        pass


@pytest.fixture(autouse=True)
def drafters(monkeypatch):
    """What engines were asked for; there is no ``suffix``."""
    asked = []

    def open_drafter(config, target):
        asked.append((config.method, config.model))
        if config.method == "suffix":
            raise ConfigError("there is no suffix here")
        return TextDrafter(lambda limits: Again())

    monkeypatch.setattr("octavo.serving.load.open_drafter", open_drafter)
    monkeypatch.setattr(spec, "PROMPTS", {"copy": ("one one", "two two"), "chat": ("hello",)})
    return asked


@pytest.fixture
def bench(capsys, tiny_model):
    """``bench("--json")``: status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        small = ("--kernels", "reference", "--max-tokens", 6, "--repeat", 2, "--threads", 1)
        status = main(["bench", "spec", str(tiny_model), *map(str, (*small, *arguments))])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_rows_as_json(bench, drafters):
    status, out, _ = bench(
        *("--methods", "ngram,suffix,medusa=heads", "--workload", "copy,chat"),
        *("--batch-sizes", "1,2", "--json"),
    )
    assert status == 0
    document = json.loads(out)
    assert drafters == [("ngram", None), ("suffix", None), ("medusa", "heads")]
    rows = document["rows"]
    assert [(row["method"], row["workload"], row["batch_size"]) for row in rows] == [
        (method, workload, size)
        for method in ("ngram", "medusa")
        for workload in ("copy", "chat")
        for size in (1, 2)
    ]
    assert all(row["same_tokens"] is True and row.keys() >= FIELDS for row in rows)
    assert all(row["drafts"] > 0 and row["speedup"] > 0 for row in rows)
    assert document["skipped"] == {"suffix": "there is no suffix here"}
    assert "suffix was left out: there is no suffix here" in document["run"]["warnings"]
    assert document["run"]["settings"]["benchmark"] == "spec"
    assert len(document["run"]["samples"]["turns"]) == len(rows)
    assert {"1", "2"} <= document["step_ms"]["ngram"].keys()


def test_a_table_for_people(bench):
    status, out, err = bench("--methods", "ngram", "--workload", "copy")
    assert status == 0
    lines = [line.strip() for line in out.splitlines()]
    speeds, shares = (line for line in lines if line.startswith("ngram, copy"))
    assert " × " in speeds and speeds.endswith("yes")
    assert shares.endswith("%")
    assert "milliseconds of a plain step by rows: 1: " in out


def test_a_model_goes_to_methods_that_take_one(bench, drafters):
    arguments = ("--methods", "ngram,eagle", "--spec-model", "folder", "--workload", "chat")
    assert bench(*arguments, "--json")[0] == 0
    assert drafters == [("ngram", None), ("eagle", "folder")]


def test_nothing_that_could_be_measured(bench):
    status, out, err = bench("--methods", "suffix,medusa", "--workload", "chat")
    assert status == 1 and out == ""
    assert "nothing was measured: there is no suffix here" in err
    assert "method medusa needs a model" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "magic"), "'magic' is none of auto, ngram"),
        (("--methods", "ngram=model"), "ngram takes no model"),
        (("--workload", "poems"), "none of copy, summary, edit, rag, json, chat, random"),
        (("--batch-sizes", "0"), "no integer of at least 1"),
        (("--temperature", "-1"), "--temperature must be"),
    ],
)
def test_wrong_usage(bench, arguments, message):
    status, out, err = bench(*arguments)
    assert (status, out) == (2, "")
    assert message in err
