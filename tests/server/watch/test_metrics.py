"""What /metrics says is what happened, under our names and vLLM's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pace import python_seconds
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from octavo.base.errors import EngineUnavailableError
from octavo.core.batch import BAD_LOGITS, DAMAGED
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import StepStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.server.engine.generation import (
    EngineFacts,
    EngineState,
    Generation,
    GenerationRequest,
)
from octavo.server.watch import metric_definitions
from octavo.server.watch.metric_definitions import FAMILIES, FINISH_REASONS, REJECTIONS
from octavo.server.watch.metrics import NAMINGS, Metrics
from octavo.serving.outputs import Delta

ROOT = Path(__file__).resolve().parents[3]
LIMITS = ("memory", "compute", "overhead")
BASE = {"model_name": "m", "engine": "0"}


def new_generation(
    request_id="r1", num_prompt=10, n=1, max_tokens: int | None = 16, **more
) -> Generation:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    request = GenerationRequest(request_id, list(range(num_prompt)), params, 0.0, **more)
    return Generation(request, abort=lambda generation: None)


def record_with(**figures) -> StepStats:
    return replace(StepStats.idle(), **figures)


def samples_of(metrics: Metrics, names: str = "all") -> dict[tuple, float]:
    """Values by name and labels, those of `BASE` apart, as a scraper reads them."""
    text = metrics.render(names)[0].decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in BASE}
            if "le" in labels:
                labels["le"] = float(labels["le"])
            if family.name.startswith(("octavo", "vllm:")):
                assert {key: sample.labels[key] for key in BASE} == BASE
            key = (sample.name, *sorted(labels.items()))
            assert key not in values, "counted twice"
            values[key] = sample.value
    return values


# -- counts are exact ------------------------------------------------------------------------

# Multiples of 2**-10: sums of them are exact in every order.
seconds = st.integers(0, 2**16).map(lambda number: number / 1024)
answers = st.fixed_dictionaries(
    {
        "num_prompt": st.integers(1, 3000),
        "num_cached": st.integers(0, 3000),
        "n": st.integers(1, 3),
        "max_tokens": st.none() | st.integers(1, 5000),
        # Each step: the sample, its tokens, and the gap before them.
        "steps": st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), seconds), max_size=12),
        "reason": st.sampled_from(FINISH_REASONS),
        "from_cache": st.booleans(),
        "num_preemptions": st.integers(0, 30),
        "times": st.lists(st.none() | seconds, min_size=6, max_size=6),
        "knows_ttft_early": st.booleans(),
    }
)
BY_POSITION = (
    *("draft_accepted_by_position", "expert_tokens", "expert_imbalance"),
    *("expert_rank_tokens", "expert_busiest_rank_tokens"),
)
records = st.builds(
    StepStats,
    **{name: st.integers(0, 99) for name in get_type_hints(StepStats)}
    | {"kv_waste": seconds}
    | dict.fromkeys(BY_POSITION, st.just(())),
)
# Totals of the engine, and the counters that follow them; by how much they grow in a step.
TOTALS = {
    "prefix_tokens_queried": "prefix_cache_queries",
    "prefix_tokens_hit": "prefix_cache_hits",
    "num_preemptions": "num_preemptions",
    "num_invariant_violations": "invariant_violations",
    "num_drafts": "spec_decode_num_drafts",
    "draft_seconds": "spec_decode_draft_seconds",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "draft_tokens_accepted": "spec_decode_num_accepted_tokens",
    "floor_seconds": "step_floor_seconds",
    "predicted_seconds": "step_predicted_seconds",
    "kv_store_errors": "kv_offload_errors",
    "constraints_compiled": "structured_outputs_compiled",
    "constraint_compile_seconds": "structured_output_compile_seconds",
    "constraint_masks": "structured_output_masks",
    "constraint_mask_seconds": "structured_output_mask_seconds",
}
# Not there before there is something to show.
NOT_ALWAYS = {
    *("step_roofline_ratio", "step_floor_seconds", "step_predicted_seconds"),
    "kv_offload_errors",
    *(f"structured_output{name}" for name in ("_compile_seconds", "_masks", "_mask_seconds")),
    "structured_outputs_compiled",
}
growth = st.tuples(*[st.integers(0, 1000)] * len(TOTALS))


class Account:
    """The same history, kept the plain way: totals by name and label, and lists of values."""

    def __init__(self):
        self.totals = Counter()
        self.values = defaultdict(list)

    def observe(self, name, value):
        if value is not None:
            self.values[name].append(value)

    def expected(self) -> dict[tuple, float]:
        expected = {}
        for family in FAMILIES:
            if family.labels or (family.name in NOT_ALWAYS and not self.values["step_seconds"]):
                continue
            for name in filter(None, (f"octavo:{family.name}", family.vllm_name)):
                if family.kind == "counter":
                    expected[f"{name}_total",] = self.totals[family.name]
                elif family.kind == "histogram":
                    values = self.values[family.name]
                    expected[f"{name}_count",] = len(values)
                    expected[f"{name}_sum",] = sum(values)
                    for edge in family.buckets:
                        below = sum(value <= edge for value in values)
                        expected[f"{name}_bucket", ("le", edge)] = below
                    expected[f"{name}_bucket", ("le", inf)] = len(values)
        for key, count in self.totals.items():
            if isinstance(key, tuple):
                for prefix in ("octavo:", "vllm:"):
                    expected[f"{prefix}{key[0]}_total", key[1:]] = count
        return expected


def play(metrics: Metrics, account: Account, number: int, answer: dict) -> None:
    """Tell the metrics of one request, and the account what a client would note of it."""
    n, num_prompt = answer["n"], answer["num_prompt"]
    num_cached = min(answer["num_cached"], num_prompt)
    generation = new_generation(f"r{number}", num_prompt, n, answer["max_tokens"])
    stats = generation.stats
    stats.num_cached_tokens, stats.num_preemptions = num_cached, answer["num_preemptions"]
    queue_time, ttft, tpot, e2e, prefill_time, decode_time = answer["times"]
    account.totals["requests_submitted"] += 1
    account.totals["request_success", "finished_reason", answer["reason"]] += 1
    metrics.on_submitted(generation)
    if answer["from_cache"]:
        generation.is_from_cache = True
        account.totals["response_cache_hits"] += 1
        metrics.on_finished(generation, answer["reason"])
        return

    if answer["knows_ttft_early"]:
        stats.ttft = ttft
    lengths = [0] * n
    for sample, num_tokens, gap in answer["steps"]:
        sample %= n
        if not any(lengths):
            account.totals["prompt_tokens"] += num_prompt
            account.totals["prompt_tokens_cached"] += num_cached
            account.totals["prompt_tokens_by_source", "source", "local_cache_hit"] += num_cached
            account.totals["prompt_tokens_by_source", "source", "local_compute"] += (
                num_prompt - num_cached
            )
            account.observe("request_prefill_kv_computed_tokens", num_prompt - num_cached)
        is_first = lengths[sample] == 0
        if not is_first:
            account.observe("inter_token_latency_seconds", gap)
        lengths[sample] += num_tokens
        account.totals["generation_tokens"] += num_tokens
        generation.push([Delta(sample, "x", [1] * num_tokens)])
        metrics.on_tokens(generation, num_tokens, None if is_first else gap)
    stats.queue_time, stats.ttft, stats.tpot, stats.e2e = queue_time, ttft, tpot, e2e
    stats.prefill_time, stats.decode_time = prefill_time, decode_time
    metrics.on_finished(generation, answer["reason"])

    account.observe("time_to_first_token_seconds", ttft)
    account.observe("request_time_per_output_token_seconds", tpot)
    account.observe("e2e_request_latency_seconds", e2e)
    account.observe("request_queue_time_seconds", queue_time)
    account.observe("request_prefill_time_seconds", prefill_time)
    account.observe("request_decode_time_seconds", decode_time)
    if prefill_time is not None:
        account.observe("request_inference_time_seconds", prefill_time + (decode_time or 0))
    account.observe("request_prompt_tokens", num_prompt)
    account.observe("request_generation_tokens", sum(lengths))
    account.observe("request_max_num_generation_tokens", max(lengths))
    account.observe("request_num_preemptions", answer["num_preemptions"])
    account.observe("request_params_n", n)
    account.observe("request_params_max_tokens", answer["max_tokens"])


# Without shrinking: an example takes 50 ms, and which figure is wrong is plain from any of them.
@settings(max_examples=60, deadline=None, phases=set(Phase) - {Phase.shrink, Phase.explain})
@given(
    st.lists(answers, max_size=6),
    st.lists(st.sampled_from(REJECTIONS), max_size=6),
    st.lists(st.tuples(records, growth), max_size=6),
    st.lists(st.sampled_from(EngineState), max_size=4),
)
def test_counts_are_those_of_the_history(requests, rejections, steps, states):
    metrics, account = Metrics("m"), Account()
    for number, request in enumerate(requests):
        play(metrics, account, number, request)
    for reason in rejections:
        metrics.on_rejected(reason)
        account.totals["admission_rejections", "reason", reason] += 1
    record, totals = StepStats.idle(), Counter()
    for record, more in steps:
        totals.update(dict(zip(TOTALS, more, strict=True)))
        metrics.on_step(replace(record, **totals))
        account.observe("iteration_tokens", record.num_tokens)
        account.observe("iteration_samples", record.num_seqs)
        account.observe("step_seconds", record.seconds)
        account.observe("step_roofline_ratio", record.roofline_share)
    account.totals.update({TOTALS[name]: count for name, count in totals.items()})
    state = EngineState.STARTING
    for state in states:
        metrics.on_engine_state(state, "")
        account.totals["engine_restarts"] += state is EngineState.RESTARTING
        if state is EngineState.RESTARTING:
            record = StepStats.idle()

    values = samples_of(metrics)
    for key, expected in account.expected().items():
        assert values[key] == expected, key
    for prefix in ("octavo:", "vllm:"):
        assert values[f"{prefix}num_requests_running",] == record.num_running
        assert values[f"{prefix}num_requests_waiting",] == record.num_waiting
        by_reason = f"{prefix}num_requests_waiting_by_reason"
        assert values[by_reason, ("reason", "capacity")] == record.num_waiting
        assert values[by_reason, ("reason", "deferred")] == 0
        assert values[f"{prefix}kv_cache_usage_perc",] == record.kv_utilisation
    assert values["octavo:num_tokens_waiting",] == record.num_waiting_tokens
    for label, count in [
        ("free", record.num_free_blocks),
        ("cached", record.num_cached_blocks),
        ("used", record.num_used_blocks),
    ]:
        assert values["octavo:kv_blocks", ("state", label)] == count
    for each in EngineState:
        assert values["octavo:engine_state", ("state", each.value)] == (each is state)


@pytest.mark.parametrize("totals", [[100, 150, 20, 30], [100, 150, 0, 20, 30], [150, 30]], ids=str)
def test_an_engine_that_counts_from_0_again_takes_nothing_back(totals):
    metrics = Metrics("m")
    for queried in totals:
        metrics.on_step(record_with(prefix_tokens_queried=queried))
    assert samples_of(metrics)["vllm:prefix_cache_queries_total",] == 180


def test_a_new_engine_may_have_counted_further_than_the_last():
    metrics = Metrics("m")
    metrics.on_step(record_with(num_preemptions=2))
    metrics.on_engine_state(EngineState.RESTARTING, "")
    metrics.on_step(record_with(num_preemptions=5))
    assert samples_of(metrics)["vllm:num_preemptions_total",] == 7


def test_what_bounds_steps_is_told_where_it_is_known():
    metrics = Metrics("m")
    metrics.on_step(record_with(seconds=0.5))
    of_steps = {name for name, *_ in samples_of(metrics) if name.startswith("octavo:step_")}
    assert of_steps == {f"octavo:step_seconds_{kind}" for kind in ("bucket", "count", "sum")}
    metered = record_with(
        seconds=0.5,
        roofline_share=0.5,
        floor_seconds=0.25,
        predicted_seconds=0.4,
        num_memory_bound=1,
        num_compute_bound=0,
        num_overhead_bound=0,
    )
    metrics.on_step(metered)
    metrics.on_step(replace(metered, floor_seconds=0.75, num_overhead_bound=1))
    values = samples_of(metrics)
    assert values["octavo:step_floor_seconds_total",] == 0.75
    assert values["octavo:step_predicted_seconds_total",] == 0.4
    assert values["octavo:step_roofline_ratio_count",] == 2
    bound = [values["octavo:step_bound_total", ("limit", limit)] for limit in LIMITS]
    assert bound == [1, 0, 1]


def test_what_was_predicted_at_the_door_is_held_against_what_came():
    metrics, generation = Metrics("m"), new_generation()
    generation.stats.ttft, generation.stats.predicted_ttft = 0.25, 0.5
    metrics.on_tokens(generation, 1, None)
    values = samples_of(metrics)
    assert values["octavo:predicted_time_to_first_token_seconds_sum",] == 0.5
    assert values["octavo:time_to_first_token_prediction_ratio_sum",] == 0.5
    metrics.on_finished(generation, "stop")
    assert samples_of(metrics)["octavo:time_to_first_token_prediction_ratio_count",] == 1


def test_drafts_are_counted_by_position():
    metrics = Metrics("m")
    metrics.on_step(record_with(draft_accepted_by_position=(5, 2)))
    metrics.on_step(record_with(draft_accepted_by_position=(6, 2, 1)))
    metrics.on_engine_state(EngineState.RESTARTING, "")
    metrics.on_step(record_with(draft_accepted_by_position=(3,)))
    values = samples_of(metrics)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [values[name, ("position", str(place))] for place in range(3)] == [9, 2, 1]


def test_experts_have_series_by_layer_and_by_rank():
    metrics = Metrics("m")
    for factor in (1, 3):
        metrics.on_step(
            record_with(
                expert_tokens=(5 * factor, 1),
                expert_imbalance=(1.5, 0.5 + factor),
                expert_rank_tokens=(4 * factor, 2),
                expert_busiest_rank_tokens=(3, 3 * factor),
            )
        )
    values = samples_of(metrics)

    def series(name, label, count=2):
        return [values[f"octavo:{name}", (label, str(place))] for place in range(count)]

    assert series("expert_tokens_total", "expert") == [15, 1]
    assert series("expert_imbalance", "layer") == [1.5, 3.5]
    assert series("expert_rank_tokens_total", "rank") == [12, 2]
    assert series("expert_busiest_rank_tokens_total", "layer") == [3, 9]


def test_a_request_that_runs_again_counts_its_prompt_once():
    metrics, generation = Metrics("m"), new_generation(num_prompt=7)
    metrics.on_tokens(generation, 1, None)
    generation.restart()
    metrics.on_tokens(generation, 1, None)
    metrics.on_finished(generation, "stop")
    values = samples_of(metrics)
    assert values["octavo:prompt_tokens_total",] == 7
    assert values["octavo:generation_tokens_total",] == 2


def test_corrupted_requests_are_those_with_bad_logits():
    from octavo.runtime import sampler

    metrics = Metrics("m")
    for errors in ([BAD_LOGITS], [None, DAMAGED], [sampler.OVERFLOW], [None]):
        generation = new_generation(n=len(errors))
        for index, error in enumerate(errors):
            reason = "stop" if error is None else "error"
            generation.push([Delta(index, "", [], [], reason, error=error)])
        metrics.on_finished(generation, str(generation.finish_reason))
    values = samples_of(metrics)
    assert values["vllm:corrupted_requests_total",] == 2
    assert values["vllm:request_success_total", ("finished_reason", "error")] == 2


def test_what_other_parts_report():
    metrics = Metrics("m")
    metrics.on_disconnect()
    metrics.on_slow_reader()
    metrics.on_http_response("/health", "GET", 200, 0.5)
    values = samples_of(metrics)
    assert values["octavo:client_disconnects_total",] == 1
    assert values["octavo:slow_readers_cut_total",] == 1
    labels = (("method", "GET"), ("route", "/health"), ("status", "200"))
    assert values["octavo:http_requests_total", *labels] == 1
    assert values["octavo:http_request_duration_seconds_sum", ("route", "/health")] == 0.5


# -- the engine, when it is watched ----------------------------------------------------------


class Engine:
    """As much of an EngineClient as a scrape reads."""

    def __init__(self):
        self.state, self.stats, self.known = EngineState.STARTING, StepStats.idle(), None

    @property
    def facts(self) -> EngineFacts:
        if self.known is None:
            raise EngineUnavailableError("starting")
        return self.known


def test_a_scrape_reads_the_engine_itself():
    metrics, engine = Metrics("m"), Engine()
    metrics.observe_engine(engine)
    assert not any("cache_config_info" in key[0] for key in samples_of(metrics))
    engine.state, engine.known = EngineState.READY, EngineFacts(128, 8, 256, 1024, 16)
    engine.stats = record_with(num_running=3, num_preemptions=2)
    values = samples_of(metrics)
    info = (("block_size", "16"), ("num_gpu_blocks", "1024"))
    assert values["vllm:cache_config_info", *info] == 1
    assert values["vllm:num_requests_running",] == 3
    assert values["vllm:num_preemptions_total",] == 2
    assert values["octavo:engine_state", ("state", "ready")] == 1
    # Asking again counts nothing again.
    assert samples_of(metrics)["vllm:num_preemptions_total",] == 2


# -- names -----------------------------------------------------------------------------------

VLLM_LABELS = {
    "num_requests_waiting_by_reason": {"reason"},
    "prompt_tokens_by_source": {"source"},
    "request_success": {"finished_reason"},
    "admission_rejections": {"reason"},
    "spec_decode_num_accepted_tokens_per_pos": {"position"},
    "cache_config_info": {"block_size", "num_gpu_blocks"},
}
VLLM_TYPES = {
    "gauge": """num_requests_running num_requests_waiting num_requests_waiting_by_reason
        kv_cache_usage_perc cache_config_info""",
    "counter": """prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens
        prompt_tokens_by_source prompt_tokens_cached generation_tokens request_success
        admission_rejections corrupted_requests spec_decode_num_drafts
        spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
        spec_decode_num_accepted_tokens_per_pos""",
    "histogram": """request_prompt_tokens request_generation_tokens iteration_tokens_total
        request_max_num_generation_tokens request_params_n request_params_max_tokens
        time_to_first_token_seconds inter_token_latency_seconds
        request_time_per_output_token_seconds e2e_request_latency_seconds
        request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
        request_decode_time_seconds request_num_preemptions request_prefill_kv_computed_tokens""",
}
VLLM_LATENCY = """0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0
    480.0 960.0 1920.0 7680.0"""
VLLM_EDGES = {
    "e2e_request_latency_seconds": VLLM_LATENCY,
    "request_queue_time_seconds": VLLM_LATENCY,
    "request_prefill_time_seconds": VLLM_LATENCY,
    "request_decode_time_seconds": VLLM_LATENCY,
    "request_inference_time_seconds": VLLM_LATENCY,
    "time_to_first_token_seconds": """0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0
        2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0""",
    "inter_token_latency_seconds": """0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5
        5.0 7.5 10.0 20.0 40.0 80.0""",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
    "request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000",
}


def test_vllm_boards_find_what_they_know():
    metrics = Metrics("m")
    metrics.observe_engine(engine := Engine())
    engine.known = EngineFacts(128, 8, 256, 1024, 16)
    text = metrics.render("vllm")[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    known = {f"vllm:{name}" for names in VLLM_TYPES.values() for name in names.split()}
    assert {name for name in families if name.startswith("vllm:")} == known
    for kind, names in VLLM_TYPES.items():
        for name in names.split():
            family = families[f"vllm:{name}"]
            assert family.type == kind, name
            for sample in family.samples:
                assert sample.labels.keys() - {"le"} == BASE.keys() | VLLM_LABELS.get(name, set())
    for name, edges in VLLM_EDGES.items():
        samples = families[f"vllm:{name}"].samples
        ours = {float(one.labels["le"]) for one in samples if "le" in one.labels}
        assert {*map(float, edges.split())} <= ours, name


def test_names_can_be_chosen():
    metrics = Metrics("m")
    prefixes = {
        names: {key[0].split(":")[0].split("_")[0] for key in samples_of(metrics, names)}
        for names in NAMINGS
    }
    process = {"process", "python"}
    assert prefixes == {
        "all": {"octavo", "vllm"} | process,
        "octavo": {"octavo"} | process,
        "vllm": {"vllm"} | process,
        "plain": {"octavo"} | process,
    }
    assert not any(":" in key[0] for key in samples_of(metrics, "plain"))


def test_openmetrics_is_spoken_where_it_is_wanted():
    metrics = Metrics("m")
    text, content_type = metrics.render("all", "text/plain;q=0.5,application/openmetrics-text")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(text.decode())}
    assert {"octavo:prompt_tokens", "vllm:prompt_tokens"} <= names


@pytest.mark.parametrize(
    "accept", ["*/*", "text/plain; version=x", "application/openmetrics-text; version=x", ";,=\x00"]
)
def test_no_accept_header_breaks_it(accept):
    text, content_type = Metrics("m").render("all", accept)
    assert b"vllm:num_requests_running" in text
    assert "x" not in content_type.partition("version")[2]


def test_servers_in_one_process_do_not_mix():
    first, second = Metrics("m"), Metrics("m")
    first.on_submitted(new_generation())
    assert samples_of(first)["octavo:requests_submitted_total",] == 1
    assert samples_of(second)["octavo:requests_submitted_total",] == 0


def test_model_names_need_no_care():
    name = 'a"b\\c\nd'
    text = Metrics(name).render()[0].decode()
    family = next(f for f in text_string_to_metric_families(text) if f.name == "vllm:prompt_tokens")
    assert family.samples[0].labels["model_name"] == name


def test_nothing_of_a_client_is_in_it():
    metrics = Metrics("m")
    generation = new_generation("canary-1", tenant="canary-2", external_id="canary-3")
    metrics.on_submitted(generation)
    metrics.on_tokens(generation, 1, None)
    metrics.on_finished(generation, "stop")
    assert b"canary" not in metrics.render()[0]


# -- the linter ------------------------------------------------------------------------------


def lint(metrics: Metrics, names: str) -> tuple[int, list[str]]:
    """promtool's exit status and complaints."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    text = metrics.render(names)[0]
    run = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    return run.returncode, (run.stdout + run.stderr).decode().splitlines()


@pytest.fixture
def used_metrics() -> Metrics:
    """With a sample of everything."""
    metrics, engine = Metrics("m"), Engine()
    metrics.observe_engine(engine)
    engine.known = EngineFacts(128, 8, 256, 1024, 16)
    metrics.on_http_response("/health", "GET", 200, 0.5)
    return metrics


def test_plain_names_are_clean(used_metrics):
    assert lint(used_metrics, "plain") == (0, [])


def test_vllm_names_are_all_that_the_linter_dislikes(used_metrics):
    _, complaints = lint(used_metrics, "all")
    assert complaints
    for complaint in complaints:
        name, _, what = complaint.partition(" ")
        assert (what == "metric names should not contain ':'" and ":" in name) or (
            name == "vllm:iteration_tokens_total" and "_total" in what
        ), complaint


# -- cost, and documentation -----------------------------------------------------------------


@pytest.mark.timing
def test_counting_tokens_is_cheap():
    """As 100 rounds of a loop in Python: 5 µs."""
    metrics, generation = Metrics("m"), new_generation()
    metrics.on_tokens(generation, 1, None)
    best = inf
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(200):
            metrics.on_tokens(generation, 1, 0.018)
        best = min(best, (time.perf_counter() - start) / 200)
    assert best <= python_seconds(100, time.perf_counter)


def test_constraints_are_counted_by_kind_and_refusals_by_reason():
    metrics = Metrics("m")
    for asked in ({"regex": "a"}, {"json_object": True}, {"json": {}}, {"json": {}}, None):
        generation = new_generation()
        generation.request.params.structured_outputs = asked and StructuredOutputs(**asked)
        metrics.on_submitted(generation)
    metrics.on_constraint_refused("too_complex")
    values = samples_of(metrics)
    name = "octavo:structured_output_requests_total"
    counts = {kind: values[name, ("kind", kind)] for kind in ("regex", "json_object", "json")}
    assert counts == {"regex": 1, "json_object": 1, "json": 2}
    name = "octavo:structured_output_refusals_total"
    assert values[name, ("reason", "too_complex")] == 1


def test_the_documentation_has_every_family():
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    table = metric_definitions.to_markdown()
    assert table in text, f"docs/metrics.md must have this table:\n{table}"


def test_no_torch_is_loaded():
    modules = ", ".join(
        f"octavo.server.watch.{name}" for name in ("metrics", "logs", "status", "observer_group")
    )
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
