"""The tables of docs/performance.md: the measurements, the text, and how it is written."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from octavo import cli
from octavo.base.errors import BenchmarkError
from octavo.bench import performance_tables, standard

ROOT = Path(__file__).parents[2]
BEGIN, END = performance_tables.markers("how-fast")


# -- a place in a file ---------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_only_what_is_between_the_markers_changes(tmp_path, newline):
    before = f"# Title — é{newline}  text  {newline}{BEGIN}".encode()
    after = f"{END} behind{newline}\t<!-- other:end -->{newline}no end of line".encode()
    path = tmp_path / "performance.md"
    path.write_bytes(before + b"\nold\r\n\r\n" + after)
    performance_tables.rewrite_file(path, {"how-fast": "\n| new |\n\n"})
    assert path.read_bytes() == before + b"\n| new |\n" + after
    performance_tables.rewrite_file(path, {"how-fast": "| new |"})
    assert path.read_bytes() == before + b"\n| new |\n" + after
    assert list(tmp_path.iterdir()) == [path]


def test_sections_are_independent():
    text = f"{BEGIN}\na\n{END}\n\n<!-- peers:begin -->\nb\n<!-- peers:end -->\n"
    assert performance_tables.rewrite(text, "peers", "c") == text.replace("\nb\n", "\nc\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "how-fast:begin --> is missing"),
        (BEGIN, "how-fast:end --> is missing"),
        (f"{BEGIN} {BEGIN} {END}", "how-fast:begin --> is there 2 times"),
        (f"{BEGIN} {END} {END}", "how-fast:end --> is there 2 times"),
        (f"{END} {BEGIN}", "how-fast:end --> stands before"),
    ],
)
def test_markers_that_are_not_right_leave_the_file_alone(tmp_path, text, message):
    path = tmp_path / "performance.md"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match=message) as error:
        performance_tables.rewrite_file(path, {"how-fast": "new"})
    assert str(path) in str(error.value)
    assert path.read_text() == text


def test_a_second_section_that_cannot_be_written_leaves_the_first_as_it_was(tmp_path):
    path = tmp_path / "performance.md"
    path.write_text(f"{BEGIN}\nold\n{END}")
    with pytest.raises(BenchmarkError, match="peers:begin"):
        performance_tables.rewrite_file(path, {"how-fast": "new", "peers": "new"})
    assert "old" in path.read_text()
    with pytest.raises(BenchmarkError, match="cannot be read"):
        performance_tables.rewrite_file(tmp_path / "none.md", {"how-fast": "new"})


@pytest.mark.skipif(not (ROOT / "docs" / "performance.md").exists(), reason="needs the source tree")
def test_the_markers_of_this_project_are_right():
    text = (ROOT / "docs" / "performance.md").read_bytes().decode()
    for name in ("how-fast", "peers"):
        assert performance_tables.rewrite(text, name, "new") != text


# -- what is measured ----------------------------------------------------------------------------


def test_the_standard_set_is_made_of_commands_that_there_are():
    for flags in (*standard.STANDARD.values(), standard.COMPARE):
        argv = ["bench", *flags, "smollm2-135m", "--json", "--threads", "2"]
        args = cli.build_parser(argv).parse_args(argv)
        assert args.subcommand == flags[0] and args.json and args.model == "smollm2-135m"


def spread(median):
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median}


def run_object(*warnings):
    probe = {"read_gbytes_per_s": 30.0, "gemm_gflops": 100.0}
    cpu = {"model": "AMD EPYC 9654", "physical_cores": 2, "logical_cores": 4}
    return {
        "date": "2026-01-31T10:00:00+00:00",
        "versions": {"octavo": "0.1.0", "torch": "2.13.0", "python": "3.12.1", "numpy": None},
        "machine": {"cpu": cpu},
        "threads": 2,
        "engine": {"kernels": "native", "isa": "avx2"},
        "noise": {"before": probe, "after": probe, "other_processors": 0.4 if warnings else 0.01},
        "settings": {"num_prompts": 64, "input_len": 128, "output_len": 128},
        "warnings": list(warnings),
        "samples": {"ttft_ms": [1.0, 2.0]},
    }


def measured(flags):
    """What a benchmark says, as far as the table asks."""
    figures = {
        "startup": {kind: {"first_token_s": spread(1.5)} for kind in ("warm", "cold")},
        "latency": {
            "input_len": 512,
            "batch_size": 8 if "--batch-size=8" in flags else 1,
            "ttft_ms": spread(200.0),
            "prefill_tps": spread(2500.0),
            "decode_tps": spread(317.0),
            "step_overhead_us": spread(45.2),
            "latencies": [float(n) for n in range(100)],
            "roofline": {
                "prefill": {"achieved": 0.5, "bound": "compute"},
                "decode": {"achieved": 0.914, "bound": "memory"},
            },
        },
        "throughput": {"spread": {"output_tps": spread(850.0)}, "peak_rss_bytes": 500 * 2**20},
        "prefix": {
            "prefix_len": 1024,
            "cold_ttft_ms": spread(400.0),
            "warm_ttft_ms": spread(27.5),
        },
        "serve": {
            "max_concurrency": 32,
            "output_throughput": 776.0,
            **{f"{p}_{n}_ms": 31.25 for p in ("median", "p99") for n in ("ttft", "itl")},
        },
    }[flags[0]]
    run = run_object("memory moved") if flags[0] == "prefix" else run_object()
    return {**figures, "run": run}


COMPARED = {
    "engines": {
        "octavo:file": {"weights": "q4_1", "version": "0.1.0"},
        "llama.cpp:q4_0": {"weights": "q4_0", "build_commit": "abc"},
        "vllm:bf16": {"weights": "bf16", "version": "0.32"},
    },
    "summary": [
        {
            "workload": workload,
            "figure": figure,
            "contender": name,
            "median": median,
            "ratios": {"octavo:file": {"of_medians": lead, "by_round": [lead - 0.1, lead + 0.1]}},
        }
        for workload, figure, *medians in (
            ("decode", "decode_tps", 306.0, 177.0, 41.0),
            ("batch-32", "output_tps", 776.0, 334.0, 395.4),
            ("batch-32", "decode_tps", 900.0, 1.0, 1.0),
            ("start", "start_s", 1.6, 0.4, 43.0),
        )
        for name, median in zip(
            ("octavo:file", "llama.cpp:q4_0", "vllm:bf16"), medians, strict=True
        )
        for lead in (medians[0] / median if figure != "start_s" else median / medians[0],)
    ],
    "run": {
        **run_object("one", "two"),
        "settings": {"rounds": 3},
        "samples": {"turns": [{"bandwidth_before": 27.0, "bandwidth_after": 60.2}]},
    },
}


@pytest.fixture
def asked(monkeypatch):
    """The commands that were run, without running them."""
    seen = []

    def fake(flags, model):
        seen.append((list(flags), model))
        return copy.deepcopy(COMPARED if flags[0] == "compare" else measured(flags))

    monkeypatch.setattr(standard, "measure", fake)
    return seen


def cells(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_says_what_was_measured_where(asked):
    text = performance_tables.how_fast(standard.run_standard("smollm2-135m", ["--threads", "2"]))
    assert [flags[0] for flags, _ in asked] == [flags[0] for flags in standard.STANDARD.values()]
    assert all(flags[-2:] == ["--threads", "2"] for flags, _ in asked)
    words = " ".join(text.split())
    assert "2 threads of “AMD EPYC 9654” (2 cores, avx2 native kernels)" in words
    assert "2026-01-31 with octavo 0.1.0, PyTorch 2.13.0, Python 3.12.1" in words
    rows = {row[0]: row[1:] for row in cells(text)}
    assert rows["figure"] == ["median", "range", "of the roofline"]
    assert rows["process start to first token, warm"] == ["1.50 s", "1.35 – 1.65", ""]
    assert rows["prefill, 512 tokens"] == ["2,500 tokens/s", "2,250 – 2,750", "50% (compute)"]
    assert rows["decode, one request"] == ["317 tokens/s", "285 – 349", "91% (memory)"]
    assert rows["decode, 8 requests"][0] == "317 tokens/s"
    assert rows["64 × (128 in, 128 out) at once, output"][0] == "850 tokens/s"
    assert rows["TTFT, a question about 1,024 tokens, further ones"][0] == "27.5 ms"
    assert rows["32 streams over HTTP, output"][0] == "776 tokens/s"
    assert len({len(row) for row in cells(text)}) == 1
    assert (
        "not quiet (1 warning): memory reads at 30 to 30 GB/s, GEMM 100 to 100 GFLOP/s, up to 0.4"
        in words
    )


def test_a_quiet_machine_is_not_doubted(asked):
    document = standard.run_standard("smollm2-135m")
    assert document["warnings"] == ["prefix: memory moved"]
    document["warnings"] = []
    assert "quiet" not in performance_tables.how_fast(document)


def test_what_is_kept_has_no_raw_data(asked):
    document = standard.run_standard("smollm2-135m")
    text = json.dumps(document)
    assert '"samples"' not in text and '"latencies"' not in text and '"warnings"' in text
    assert standard.file_name(document) == "2026-01-31-amd-epyc-9654.json"


def test_peers_are_compared_by_medians_with_the_best_other():
    text = performance_tables.peers(COMPARED)
    rows = {row[0]: row[1:] for row in cells(text)}
    assert rows["work"] == [
        *("octavo, Q4_1", "llama.cpp, Q4_0", "vllm, bf16", "octavo to the best other"),
    ]
    assert rows["decode, 128 tokens after 128, tokens/s"] == [
        "306",
        "177",
        "41",
        "1.73 × (1.63 – 1.83)",
    ]
    batch = rows["32 × (128 in, 128 out), output tokens/s"]
    assert batch == ["776", "334", "395", "1.96 × (1.86 – 2.06)"]
    assert rows["process start to first token, s"] == ["1.6", "0.4", "43", "0.25 × (0.15 – 0.35)"]
    words = " ".join(text.split())
    assert "medians of 3 rounds, octavo 0.1.0, llama.cpp abc, vllm 0.32" in words
    assert "27 to 60 GB/s meanwhile, with 2 warnings" in words


def test_a_figure_that_an_engine_lacks_is_an_empty_cell():
    less = copy.deepcopy(COMPARED)
    less["summary"] = [row for row in less["summary"] if row["contender"] != "octavo:file"][:1]
    assert cells(performance_tables.peers(less))[-1] == [
        "decode, 128 tokens after 128, tokens/s",
        "177",
    ]


# -- how far predictions are off ------------------------------------------------------------------

VALIDATED = {
    "rows": [{"trace": trace, "repeat": repeat} for trace in ("a", "b") for repeat in (0, 0, 1)],
    "summary": {
        "mean_ttft_ms": {
            "mean_abs_error": 0.0312,
            "max_abs_error": 0.5,
            "inside_interval": 0.95,
            "mean_abs_error_as_calibrated": 0.07,
        }
    },
    "calibration": {"about": {"model": "m.gguf"}, "measured_at": "2026-01-31T00:00:00+00:00"},
    "run": run_object("one", "two"),
}


def test_errors_of_simulations_are_told_by_figure():
    text = performance_tables.predicted(VALIDATED)
    assert "`m.gguf` on 2 threads" in text and "4 runs of 2 traces" in text
    assert cells(text)[-1] == ["mean time to first token", "3.1%", "50.0%", "95%", "7.0%"]
    assert "not quiet: 2 warnings" in text


# -- scripts/bench -------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    peers = "<!-- peers:begin -->\nkept\n<!-- peers:end -->"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").write_text(f"# x\n\n{BEGIN}\nstale\n{END}\n\n{peers}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tables_and_results_are_written(asked, project, capsys):
    assert standard.main(["--threads", "1"]) == 0
    text = (project / "docs" / "performance.md").read_text()
    assert "decode, one request" in text and "stale" not in text and "kept" in text
    (stored,) = (project / "benchmarks" / "results").iterdir()
    assert json.loads(stored.read_text())["threads"] == 2
    assert "decode, one request" in capsys.readouterr().out
    assert asked[0][0][-2:] == ["--threads", "1"]


def test_several_validations_stand_one_after_the_other(asked, project):
    marked = "<!-- predicted:begin -->\n<!-- predicted:end -->"
    (project / "docs" / "performance.md").write_text(marked)
    for name in ("one", "two"):
        (project / name).write_text(json.dumps(VALIDATED))
    assert standard.main(["--from", "one", "two"]) == 0
    assert (project / "docs" / "performance.md").read_text().count("mean time to first token") == 2


def test_peers_are_written_to_their_own_place(asked, project):
    assert standard.main(["--peers", "--dir", "there"]) == 0
    assert "--dir=there" in asked[-1][0]
    text = (project / "docs" / "performance.md").read_text()
    assert "kept" not in text and "octavo to the best other" in text
    names = sorted(path.name for path in (project / "benchmarks" / "results").iterdir())
    assert names == ["2026-01-31-amd-epyc-9654.json", "peers-2026-01-31-amd-epyc-9654.json"]


def test_a_dry_run_writes_nothing(asked, project, capsys):
    before = (project / "docs" / "performance.md").read_bytes()
    assert standard.main(["--dry-run"]) == 0
    assert (project / "docs" / "performance.md").read_bytes() == before
    assert [path.name for path in project.iterdir()] == ["docs"]
    assert "decode, one request" in capsys.readouterr().out


def test_stored_results_are_written_without_measuring(asked, project):
    standard.main([])
    (project / "peers.json").write_text(json.dumps(COMPARED))
    (stored,) = (project / "benchmarks" / "results").iterdir()
    asked.clear()
    assert standard.main(["--from", str(stored), "peers.json"]) == 0
    assert not asked and "kept" not in (project / "docs" / "performance.md").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "of none of scripts/bench"), ("{", "cannot be read"), (None, "cannot be read")],
)
def test_what_is_no_result_is_refused(project, content, message, capsys):
    if content is not None:
        (project / "other.json").write_text(content)
    assert standard.main(["--from", "other.json"]) == 1
    assert message in capsys.readouterr().err


def test_a_document_without_markers_is_found_before_the_measuring(asked, project, capsys):
    (project / "docs" / "performance.md").write_text("no markers")
    assert standard.main([]) == 1
    assert not asked and "is missing" in capsys.readouterr().err


def test_a_benchmark_that_fails_is_an_error(project, capfd):
    assert standard.main(["--no-such-flag"]) == 1
    assert "octavo bench startup" in capfd.readouterr().err
    assert "stale" in (project / "docs" / "performance.md").read_text()
