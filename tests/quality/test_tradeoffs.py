"""Points from what ``octavo quantize --json`` prints."""

from __future__ import annotations

import json

import pytest

from octavo.base.errors import BenchmarkError
from octavo.quality.report import QuantizationReport
from octavo.quality.tradeoffs import read_tradeoffs, tradeoffs

REPORT = QuantizationReport(
    "built-in", 3072, 9.5, 9.25, 0.01, 0.2, 0.9, 80.0, 800.0, 50.0, 700.0, 9.6, 0.02
)


def row(name="out-gptq", **changes):
    made = {"out": f"/somewhere/{name}", "method": "gptq", "format": "gptq"}
    sizes = {"bits_per_weight": 6.5, "bytes": 1000, "elapsed_s": 3.0}
    return {**made, **sizes, "report": REPORT.as_json(), **changes}


def test_rows_of_a_comparison(tmp_path):
    path = tmp_path / "compared.json"
    path.write_text(json.dumps({"rows": [row(), row("out-q4_0.gguf", bits_per_weight=5.4)]}))
    first, second = read_tradeoffs(path)
    assert (first.name, first.bits_per_weight, first.num_bytes) == ("out-gptq", 6.5, 1000)
    assert (first.kl, first.perplexity, first.base_perplexity) == (0.01, 9.5, 9.25)
    assert (first.decode_tps, first.base_decode_tps, first.tokens) == (80.0, 50.0, 3072)
    assert (second.name, second.bits_per_weight) == ("out-q4_0.gguf", 5.4)
    assert json.loads(json.dumps(first.as_json()))["kl"] == 0.01


def test_one_row_is_a_document_too():
    assert [point.name for point in tradeoffs(row())] == ["out-gptq"]


@pytest.mark.parametrize(
    "document, what",
    [
        ([1], "is not what octavo quantize prints"),
        ({"rows": []}, "has no rows"),
        ({"rows": [row(), row(report=None)]}, "row 2 has no report"),
        ({"rows": [{"report": REPORT.as_json()}]}, "row 1 has no out"),
        (row(report={"kl_mean": 0.1}), "row 1 has no perplexity"),
        (row(bits_per_weight="many"), "row 1: could not convert"),
    ],
)
def test_what_is_something_else(document, what, tmp_path):
    path = tmp_path / "compared.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BenchmarkError, match=what) as caught:
        read_tradeoffs(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(BenchmarkError, match="cannot be read"):
        read_tradeoffs(tmp_path / "nowhere.json")
    (tmp_path / "text.json").write_text("rows")
    with pytest.raises(BenchmarkError, match="is not JSON"):
        read_tradeoffs(tmp_path / "text.json")


def test_what_of_a_comparison_could_not_be_judged_is_no_point():
    document = {"rows": [row(), row("other", report=None)], "failed": {"other": "no memory"}}
    assert len(tradeoffs(document)) == 1
