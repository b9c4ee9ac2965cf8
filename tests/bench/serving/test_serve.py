from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from pace import python_seconds

from octavo.base.errors import ConfigError
from octavo.bench.serving import serve, server_process
from octavo.bench.serving.endpoint import ServerError
from octavo.bench.serving.serve import count_tokens, run_serve_bench
from octavo.bench.serving.serve_config import (
    ReportSettings,
    ServeBenchConfig,
    ServedWorkload,
    ServerTarget,
)
from octavo.bench.serving.server_process import running_server
from octavo.measure.request_record import RequestRecord
from octavo.workload.settings import LoadSettings


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def workload(tmp_path):
    """A dataset that makes the fake server do these things, in this order."""

    def create(*scripts: dict, **settings):
        lines = [
            json.dumps({"prompt": json.dumps({"first": 0.0, "gaps": [], **script})})
            for script in scripts
        ]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        return ServedWorkload(
            dataset_name="jsonl", dataset_path=str(tmp_path / "prompts.jsonl"), **settings
        )

    return create


@pytest.mark.timing
def test_a_load_test(fake_server, workload, tmp_path):
    """Warm-up, load, goodput, files."""
    scripts = [{"first": 0.02, "gaps": [0.01] * 4}] * 15 + [{"first": 0.3}] * 5
    scripts += [{"status": 429}]
    config = ServeBenchConfig(
        target=ServerTarget(
            base_url=fake_server.url, api_key="k", header=("X-A=b",), num_warmups=3
        ),
        workload=workload(*scripts, extra_body='{"min_tokens": 2}'),
        load=LoadSettings(request_rate=100, max_concurrency=50),
        report=ReportSettings(
            goodput=("ttft:150", "tpot:100"),
            save_result=True,
            save_detailed=True,
            result_dir=str(tmp_path / "results"),
            metadata=("note=x",),
            request_log=str(tmp_path / "log.jsonl"),
        ),
    )
    shown = []
    result = run_serve_bench(config, lambda ended, total: shown.append((ended, total)))
    log = fake_server.log()
    assert len(log) == 1 + 3 + 21  # the first to see if it answers
    assert shown == [(ended, 21) for ended in range(1, 22)]
    assert log[-1]["headers"]["authorization"] == "bearer k" and log[-1]["headers"]["x-a"] == "b"
    assert log[-1]["body"]["min_tokens"] == 2 and log[-1]["body"]["model"] == "fake/model"

    document = result.as_json()
    assert (document["completed"], document["failed"], document["num_prompts"]) == (20, 1, 21)
    assert document["model_id"] == "fake/model" and document["note"] == "x"
    assert document["octavo"]["goodput"]["attainment"]["good"] == 15
    # test_load.py measures how exact these are; a busy machine makes them longer, and the server's.
    late = 1e3 * python_seconds(5e5, time.perf_counter)
    answered = [entry for entry in log[4:] if entry["events"]]
    for name, seconds in (
        ("ttft", [entry["events"][0] - entry["received"] for entry in answered]),
        ("itl", [b - a for entry in answered for a, b in itertools.pairwise(entry["events"])]),
    ):
        assert document[f"median_{name}_ms"] == pytest.approx(1e3 * median(seconds), abs=late)
    assert document["median_tpot_ms"] == pytest.approx(document["median_itl_ms"], abs=late)
    run = document["run"]
    assert run["settings"]["target"]["api_key"] == "(given)"
    assert run["settings"]["target"]["header"] == ["X-A"] and run["noise"]["before"]
    assert "Successful requests:                     20" in result.as_text()

    saved, logged = result.write_files()
    assert json.loads(Path(saved).read_text()) == json.loads(json.dumps(document))
    assert saved.startswith(str(tmp_path / "results" / "openai-100.0qps-concurrency50-model-"))
    lines = Path(logged).read_text("utf-8").split("\n")[:-1]
    assert [RequestRecord(**json.loads(line)) for line in lines] == result.report.records


def test_chat(fake_server, workload, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    config = ServeBenchConfig(
        target=ServerTarget(
            base_url=fake_server.url + "/v9/", backend="openai-chat", model_name="given"
        ),
        workload=workload(*[{"gaps": [0]}] * 4),
        load=LoadSettings(max_concurrency=2),
    )
    result = run_serve_bench(config)
    assert result.report.metrics.total_output_tokens == 8
    assert "another has ended" in result.report.saturation.reason
    entry = fake_server.log()[-1]
    assert entry["path"] == "/v9/v1/chat/completions" and entry["body"]["model"] == "given"
    assert entry["headers"]["authorization"] == "bearer from-environment"


def test_a_server_that_is_not_there(workload):
    config = ServeBenchConfig(
        target=ServerTarget(base_url="http://127.0.0.1:9", ready_check_timeout_sec=0.1),
        workload=workload({}),
    )
    with pytest.raises(ServerError, match="nothing answers at http://127.0.0.1:9"):
        run_serve_bench(config)


def test_made_up_prompts_need_a_vocabulary(fake_server):
    config = ServeBenchConfig(target=ServerTarget(base_url=fake_server.url))
    with pytest.raises(ConfigError, match="--tokenizer"):
        run_serve_bench(config)


class ByteTokenizer:
    vocab_size = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode("latin-1")

    def is_special(self, token_id):
        return token_id < 200


@pytest.mark.parametrize("prompt_format", ["ids", "text"])
def test_a_server_without_a_list_of_models_at_the_url_that_openai_has(
    fake_server, monkeypatch, prompt_format
):
    """Its model is the one that is named for its tokenizer; paths do not have /v1 twice."""
    monkeypatch.setattr(serve, "_load_tokenizer", lambda name: ByteTokenizer())
    config = ServeBenchConfig(
        model="a/model",
        target=ServerTarget(
            base_url=fake_server.url + "/nameless/v1/", prompt_format=prompt_format
        ),
        workload=ServedWorkload(num_prompts=2, random_input_len=5, random_output_len=3),
    )
    assert run_serve_bench(config).report.metrics.completed == 2
    entry = fake_server.log()[-1]
    assert entry["path"] == "/nameless/v1/completions" and entry["body"]["model"] == "a/model"
    assert isinstance(entry["body"]["prompt"], str if prompt_format == "text" else list)
    assert len(entry["body"]["prompt"]) == 5


def test_answers_without_usage_are_counted_by_a_tokenizer():
    answered = {"first_token": 1.0, "last_token": 1.0, "output_tokens": 1, "text": "abcd"}
    records = [
        RequestRecord("a", 0.0, 0.0, 1.0, **answered),
        RequestRecord("b", 0.0, 0.0, 1.0, output_tokens_from="usage", **answered),
        RequestRecord("c", 0.0, 0.0, 0.0, error="refused", text="ab"),
    ]
    count_tokens(records, ByteTokenizer())
    assert [each.output_tokens for each in records] == [4, 1, 0]
    assert records[0].output_tokens_from == "tokenizer"


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: ServerTarget(endpoint="v1"), "endpoint"),
        (lambda: ServerTarget(header=("x",)), "header: 'x' is no NAME=VALUE"),
        (lambda: ServerTarget(num_warmups=-1), "num_warmups"),
        (lambda: ServerTarget(request_timeout=0), "request_timeout"),
        (lambda: ServedWorkload(extra_body="{"), "extra_body is no JSON"),
        (lambda: ServedWorkload(extra_body="[]"), "no JSON object"),
        (lambda: ReportSettings(goodput=("x:1",)), "goodput"),
        (lambda: ReportSettings(metric_percentiles="101"), "metric_percentiles"),
        (lambda: ReportSettings(metric_percentiles="a"), "metric_percentiles"),
        (lambda: ReportSettings(percentile_metrics="ttft,x"), "'x' is none of ttft"),
        (lambda: ReportSettings(steady_state_share=0), "steady_state_share"),
        (lambda: ReportSettings(metadata=("x",)), "metadata"),
    ],
)
def test_settings_are_checked(create, message):
    with pytest.raises(ConfigError, match=message):
        create()


def test_a_server_of_our_own(tiny_model):
    """Started, asked with token ids, and gone."""
    config = ServeBenchConfig(
        str(tiny_model),
        workload=ServedWorkload(
            num_prompts=6, random_input_len=12, random_output_len=6, ignore_eos=True
        ),
        load=LoadSettings(max_concurrency=3),
        report=ReportSettings(metric_percentiles="99"),
        server_flags=("--max-num-seqs=2",),
    )
    result = run_serve_bench(config)
    metrics = result.report.metrics
    assert (metrics.completed, metrics.failed) == (6, 0), result.report.errors
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (72, 36)
    assert metrics.total_cached_tokens == 0  # of the warm-up, too, nothing can be reused
    assert metrics.max_concurrent_requests == 3
    assert result.report.output_tokens_from == {"usage": 6}
    url = result.config.target.base_url
    with pytest.raises(ServerError, match=f"nothing answers at {url}"):
        run_serve_bench(
            ServeBenchConfig(target=ServerTarget(base_url=url, ready_check_timeout_sec=0))
        )


def test_a_server_that_does_not_start(tmp_path):
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(ServerError, match="before it was ready: /.*/empty/.*there is no"),
        running_server(str(tmp_path / "empty")),
    ):
        pass


def test_a_server_is_ended_whatever_happens(monkeypatch):
    """Here, it does not mind a SIGTERM."""
    stubborn = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('m is ready on http://[::1]:1 after', file=sys.stderr, flush=True); time.sleep(60)"
    )
    started = []
    popen = subprocess.Popen

    def start(command, **options):
        assert command[1:4] == ["-m", "octavo", "serve"]
        started.append(popen([sys.executable, "-c", stubborn], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(server_process, "_STOP_SECONDS", 0.2)
    with pytest.raises(ZeroDivisionError), running_server("m") as url:
        assert url == "http://[::1]:1"
        raise ZeroDivisionError
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("on_interrupt", [signal.default_int_handler, signal.SIG_IGN])
def test_termination_is_an_interruption(on_interrupt):
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        interrupt_by_termination()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_by_termination():
    with pytest.raises(KeyboardInterrupt), server_process._termination_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
