"""``octavo spec``: what is typed, what is said, and what is refused."""

from __future__ import annotations

import json

import pytest

from octavo.cli import main


@pytest.fixture
def spec(capsys):
    """``spec("--alpha", .8)``: status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main(["spec", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def document(spec):
    def run(*arguments: object) -> dict:
        status, out, err = spec(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


def test_best_length(document):
    found = document("--alpha", 0.8, "--cost-ratio", 0.05)
    assert found["best_k"] == found["k"] == 8
    assert found["speedup"] == found["best_speedup"] == pytest.approx(3.092, abs=5e-4)
    assert found["expected_tokens"] == pytest.approx(4.329, abs=5e-4)
    speeds = {row["k"]: row["speedup"] for row in found["table"]}
    assert list(speeds) == list(range(1, 17))
    assert speeds[5] == pytest.approx(2.951, abs=5e-4)


def test_a_length_that_is_asked_for(document):
    found = document("--alpha", 0.7, "--cost-ratio", 0.07, "--k", 5)
    assert found["k"] == 5
    assert found["expected_tokens"] == pytest.approx(2.941, abs=5e-4)
    assert found["expected_accepted"] == pytest.approx(1.941, abs=5e-4)
    assert found["speedup"] == pytest.approx(2.179, abs=5e-4)
    assert found["acceptance_rate"] == pytest.approx(1.941 / 5, abs=5e-4)
    assert found["operations_factor"] == pytest.approx(6 / 2.941, abs=5e-4)


def test_batches_and_rows(document):
    found = document("--alpha", 0.7, "--k", 3, "--batch", 4, "--row-cost", 0.16)
    assert found["speedup"] == pytest.approx(2.533 * 1.48 / 3.4, abs=5e-4)
    assert found["break_even_batch"] > 4
    beyond = document(
        *("--alpha", 0.7, "--k", 3, "--row-cost", 0.16, "--batch", found["break_even_batch"])
    )
    assert beyond["speedup"] <= 1 and beyond["break_even_batch"] == found["break_even_batch"]


def test_rows_are_free_until_there_is_a_batch(document):
    assert document("--alpha", 0.7)["row_cost"] == 0.0
    assert document("--alpha", 0.7)["break_even_batch"] is None
    found = document("--alpha", 0.7, "--batch", 2)
    assert found["row_cost"] == 0.07 and found["break_even_batch"] > 1


def test_acceptance_in_other_words(document):
    by_length = document("--acceptance-length", 2.533, "--k", 3)
    assert by_length["alpha"] == pytest.approx(0.7, abs=1e-3)
    by_rates = document("--rates", "0.8,0.625,0.6")
    by_shares = document("--accepted-by-position", "0.8,0.5,0.3")
    assert by_rates["alpha"] is by_shares["alpha"] is None
    for found in (by_rates, by_shares):
        assert found["expected_tokens"] == pytest.approx(2.6)
        assert found["best_k"] == 3 and len(found["table"]) == 3


def test_drafts_that_do_not_pay(document, spec):
    found = document("--alpha", 0.1, "--cost-ratio", 0.2)
    assert (found["best_k"], found["k"], found["speedup"]) == (0, 0, 1.0)
    assert found["acceptance_rate"] is found["break_even_batch"] is None
    status, out, _ = spec("--alpha", 0.1, "--cost-ratio", 0.2)
    assert status == 0
    assert "Drafts do not pay for a single request" in out and "alpha > C" in out


def test_tables_for_people(spec):
    status, out, err = spec("--alpha", 0.8, "--cost-ratio", 0.05, "--k", 3, "--row-cost", 0.05)
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if " × " in line}
    assert "asked for" in rows["3"] and "best" not in rows["3"]
    assert sum("best" in row for row in rows.values()) == 1
    assert "With k = 3, plain decoding is as fast from a batch of" in out


def test_a_model_on_a_machine(document, tiny_model):
    machine = ("--model", tiny_model, "--bandwidth", 10)
    reading = document("--alpha", 0.7, "--k", 3, *machine, "--compute", 1e6)
    assert reading["row_cost"] is None
    # Where arithmetic is free, rows cost the keys and values that they write.
    assert 2.4 < reading["speedup"] < 2.533
    computing = document("--alpha", 0.7, "--k", 3, *machine, "--compute", 1e-3)
    # Where it is all there is, four rows are four steps, but for attention to growing contexts.
    assert computing["speedup"] == pytest.approx(2.533 / 4, abs=5e-3)
    assert computing["best_k"] == 0 and computing["break_even_batch"] == 1
    far = document("--alpha", 0.7, "--k", 3, *machine, "--compute", 2, "--context", 100_000)
    assert far["speedup"] != document("--alpha", 0.7, "--k", 3, *machine, "--compute", 2)["speedup"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of the arguments --alpha"),
        (("--alpha", 1.5), "'1.5' is not a probability"),
        (("--alpha", "nan"), "'nan' is not a probability"),
        (("--alpha", 0.5, "--rates", "0.5"), "not allowed with"),
        (("--alpha", 0.5, "--k", 0), "'0' is no integer of at least 1"),
        (("--alpha", 0.5, "--k", 65), "more than 64"),
        (("--alpha", 0.5, "--cost-ratio", -1), "'-1' is not a number of at least 0"),
        (("--acceptance-length", 2.0), "needs --k"),
        (("--acceptance-length", 9.0, "--k", 3), "drafts of 3 tokens bring 1 to 4"),
        (("--rates", "0.5,0.4", "--k", 3), "more than the 2 positions"),
        (("--accepted-by-position", "0.4,0.5"), "cannot grow"),
        (("--alpha", 0.5, "--bandwidth", 3), "need --model"),
        (("--alpha", 0.5, "--model", "x"), "needs --bandwidth and --compute"),
        (("--alpha", 0.5, "--model", "x", "--row-cost", 0.1), "leave one out"),
    ],
)
def test_wrong_usage(spec, arguments, message):
    status, out, err = spec(*arguments)
    assert (status, out) == (2, "")
    assert message in err
