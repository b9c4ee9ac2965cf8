from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

import octavo.planner
from octavo.base.errors import ConfigError
from octavo.cost.engine_profile import Limits
from octavo.cost.work import Span
from octavo.planner import Question, Traffic, plan, plan_json
from octavo.planner.confirmation import simulated
from octavo.planner.money import rented

KEYS = {
    *("feasible", "binding", "parameters", "weights_bytes", "kv_bytes_per_token"),
    *("kv_bytes_per_token_per_rank", "memory", "kv_tokens", "max_concurrency", "prefill_ms"),
    *("decode_step_ms", "ttft_ms", "tpot_ms", "output_tps", "cost", "bound", "advice"),
}


def test_a_plan_says_all_that_is_promised():
    found = plan("llama-3.1-8b", "h100-sxm", Traffic(1024, 256, concurrency=32), engine="vllm")
    document = plan_json(found)
    assert document.keys() >= KEYS
    assert document["feasible"] is True and document["binding"] is None
    assert document["parameters"] == 8_030_261_248
    assert document["weights_bytes"] == 2 * 8_030_261_248
    assert document["kv_bytes_per_token"] == document["kv_bytes_per_token_per_rank"] == 131_072
    assert document["memory"].keys() >= {
        *("total_bytes", "usable_bytes", "weights_bytes", "activations_bytes", "kv_bytes")
    }
    for name in ("prefill_ms", "decode_step_ms", "ttft_ms", "tpot_ms", "output_tps"):
        figure = document[name]
        assert figure.keys() == {"value", "low", "high", "source"}, name
        assert 0 < figure["low"] < figure["value"] < figure["high"], name
    assert document["cost"].keys() >= {"per_request", "per_million_output_tokens", "per_day"}
    assert document["bound"] == {"prefill": "compute", "decode": "memory"}
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("engine", ["vllm", "octavo"])
@pytest.mark.parametrize("input_len", [256, 4096])
def test_without_a_queue_a_plan_is_what_the_simulator_does(engine, input_len):
    """Reference case R34, on the steps of a real model. Octavo paces prompts, vLLM does not."""
    traffic = Traffic(input_len, 128, concurrency=8)
    found = plan("llama-3.1-8b", "l40s", traffic, engine=engine)
    records = simulated(found.deployment, traffic).records
    latency = found.service.latency()
    means = [sum(getattr(each, name) for each in records) / 8 for name in ("ttft", "tpot", "e2el")]
    assert [latency.ttft.value, latency.tpot.value, latency.e2e.value] == pytest.approx(means, 0.01)
    assert found.service.requests_per_second.value == pytest.approx(
        8 / max(each.last_token for each in records), rel=0.01
    )


def test_a_rate_is_near_what_the_simulator_does():
    traffic = Traffic(512, 64, rate=12)
    found = plan("llama-3.1-8b", "h100-sxm", traffic, engine="vllm")
    records = simulated(found.deployment, traffic, num_requests=200).records
    latency = found.service.latency()
    for value, name in ((latency.ttft, "ttft"), (latency.tpot, "tpot"), (latency.e2e, "e2el")):
        mean = sum(getattr(each, name) for each in records) / len(records)
        assert value.value == pytest.approx(mean, rel=0.15), name


def test_steps_of_a_plan_are_those_of_the_cost_model():
    found = plan("qwen3-0.6b", "l4", Traffic(100, 20, concurrency=4))
    steps = found.deployment.steps
    assert found.prefill.value == pytest.approx(steps.cost([Span(0, 100)]).total.value)
    assert found.decode_step.value == pytest.approx(steps.cost([Span(109, 1)] * 4).total.value)


def test_the_wall_of_memory():
    """Reference case R19: no engine is faster than reading the weights."""
    found = plan("llama-2-70b", "h200", Traffic(128, 32), engine="vllm", limits=Limits())
    reading = found.deployment.memory.weights_bytes / found.deployment.device.memory_bandwidth
    assert found.decode_step.low > reading


def test_the_design_challenge_has_no_answer():
    """Reference case R41: 100 requests a second of 500 and 200 tokens, P99 of a second, on four
    replicas of eight. An answer is 200 steps, and no replica takes 5 ms for one."""
    traffic = Traffic(500, 200, rate=100)
    found = plan(
        *("llama-3-70b", "h100-sxm:32", traffic), tp=8, quantization="fp8", engine="vllm",
        slo="e2e=1s@p99",
    )  # fmt: skip
    assert not found.is_feasible
    assert found.verdict.binding.name == "tpot"
    assert found.verdict.binding.violated == ("e2e_p99",)
    assert "199 times" in found.verdict.binding.why
    assert (
        found.feasible_alternatives.rate == 0.0 and found.feasible_alternatives.num_devices is None
    )
    assert found.feasible_alternatives.limits["e2e_p99"] > 1.0
    shorter = Traffic(500, found.feasible_alternatives.output_len, rate=100)
    asked = {"tp": 8, "quantization": "fp8", "engine": "vllm", "slo": "e2e=1s@p99"}
    assert 10 < shorter.output_len < 199
    assert plan("llama-3-70b", "h100-sxm:32", shorter, **asked).is_feasible
    # It would be, if that were of the first token.
    first = plan(
        *("llama-3-70b", "h100-sxm:32", traffic), tp=8, quantization="fp8", engine="vllm",
        slo="ttft=1s@p99",
    )  # fmt: skip
    assert first.is_feasible


@pytest.mark.parametrize(
    "model, hardware, traffic, choices, binding",
    [
        ("llama-3.1-70b", "h100-sxm", Traffic(512, 128), {}, "weights"),
        ("llama-3.1-8b", "rtx4090", Traffic(60_000, 512, concurrency=64), {}, "kv"),
        ("llama-3-8b", "h100-sxm", Traffic(8000, 500), {}, "max_model_len"),
        ("llama-3.1-8b", "l4", Traffic(2000, 200, rate=50), {}, "throughput"),
        ("llama-3.1-8b", "h200", Traffic(100, 500, rate=5),
         {"limits": Limits(max_num_seqs=4)}, "max_num_seqs"),
        ("llama-3.1-8b", "h100-sxm", Traffic(30_000, 10), {"slo": "ttft=200"}, "ttft"),
        ("llama-3.1-8b", "h100-sxm", Traffic(30_000, 10), {"slo": "e2e=300"}, "ttft"),
        ("llama-3.1-8b", "h100-sxm", Traffic(100, 10), {"slo": "tpot_mean=2"}, "tpot"),
    ],
)  # fmt: skip
def test_what_is_in_the_way_is_named(model, hardware, traffic, choices, binding):
    found = plan(model, hardware, traffic, engine="vllm", **choices)
    assert found.verdict.binding.name == binding, found.verdict.binding
    assert found.verdict.binding.why
    document = plan_json(found)
    assert document["feasible"] is False and document["nearest"] is not None
    assert (document["ttft_ms"] is None) == (binding not in ("ttft", "tpot"))
    assert document["prefill_ms"]["value"] > 0


def test_a_limit_inside_of_an_interval_is_not_certain():
    def sure(limit: float) -> bool:
        slo = f"tpot_mean={limit}"
        return plan("llama-3.1-8b", "h100-sxm", engine="vllm", slo=slo).verdict.is_certain

    middle = plan("llama-3.1-8b", "h100-sxm", engine="vllm").service.latency().tpot
    assert not sure(middle.value * 1e3 * 1.01) and not sure(middle.value * 1e3 * 0.99)
    assert sure(middle.high * 1e3 * 1.01) and sure(middle.low * 1e3 * 0.99)


def test_replicas_share_the_traffic():
    one = plan("llama-3.1-8b", "h100-sxm", Traffic(512, 64, concurrency=8), tp=1)
    four = plan("llama-3.1-8b", "h100-sxm:4", Traffic(512, 64, concurrency=32), tp=1)
    assert four.deployment.replicas == 4
    assert four.service.latency() == one.service.latency()
    rates = [each.service.requests_per_second.value for each in (one, four)]
    assert rates[1] == pytest.approx(4 * rates[0])
    assert four.bill.per_request.value == pytest.approx(one.bill.per_request.value)


def test_a_lone_request_is_fastest_on_all_devices_and_many_on_replicas():
    alone = plan("llama-3.1-8b", "h100-sxm:4", Traffic(512, 128), engine="vllm")
    assert alone.deployment.parallel.tp == 4
    many = plan("llama-3.1-8b", "h100-sxm:4", Traffic(512, 128, concurrency=512), engine="vllm")
    assert many.deployment.replicas > 1


def test_costs_follow_from_the_rate_or_from_what_is_usual():
    price = rented(2.0)
    at_rate = plan("llama-3.1-8b", "h100-sxm", Traffic(512, 128, rate=2), price=price)
    assert at_rate.bill.per_request.value == pytest.approx(2.0 / 7200)
    assert at_rate.bill.utilization == pytest.approx(2 / at_rate.capacity.value)
    together = plan("llama-3.1-8b", "h100-sxm", Traffic(512, 128, concurrency=4), price=price)
    assert together.bill.utilization == 0.6
    with pytest.raises(ConfigError, match="utilization follows from the rate"):
        plan("llama-3.1-8b", "h100-sxm", Traffic(rate=2), utilization=0.5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model": "llama-3.1-9b"}, "llama-3.1-8b"),
        ({"hardware": "h1000"}, "H100"),
        ({"quantization": "fp7"}, "fp8"),
        ({"engine": "vlm"}, "vllm"),
        ({"tp": 3, "engine": "vllm"}, "heads"),
        ({"hardware": "h100-sxm:6", "tp": 4}, "do not make replicas"),
        ({"tp": 0}, "tp must be 1 or more"),
        ({"slo": "ttft=1,ttft=2"}, "twice"),
    ],
)
def test_what_cannot_be_is_said_with_what_is_near(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(**{"model": "llama-3.1-8b", "hardware": "h100-sxm", **arguments})


@pytest.mark.parametrize(
    "wrong", [{"rate": -1}, {"rate": math.nan}, {"rate": 0}, {"input_len": 0}, {"concurrency": 0}]
)
def test_impossible_traffic_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Traffic(**wrong)


def test_the_same_question_has_the_same_answer():
    question = {"traffic": Traffic(700, 90, rate=3), "slo": "ttft=500,tpot=60", "engine": "vllm"}
    code = (
        "from octavo.planner import Traffic, plan, plan_json; import json;"
        "print(json.dumps(plan_json(plan('qwen3-8b', 'a100-80-sxm', Traffic(700, 90, rate=3),"
        "slo='ttft=500,tpot=60', engine='vllm'))))"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(elsewhere.stdout) == plan_json(plan("qwen3-8b", "a100-80-sxm", **question))


# A planner's import may take as many times as long as that of these.
KNOWN = (
    "asyncio, http.server, unittest.mock, xml.dom.minidom, multiprocessing.pool, email.mime.text"
)
MOST_IMPORT = 1.8  # 1.35 is usual


def test_importing_the_planner_is_quick(tmp_path):
    """As modules of Python's own (KNOWN) that took as long as it may: 100 ms; with all that plans
    are made by, and with bytecode as an installation has it. Nothing of it computes with arrays."""
    code = (
        "import sys, time; start = time.process_time();"
        "{}; quick = time.process_time() - start;"
        "{};"
        "print(quick, 'numpy' in sys.modules or 'torch' in sys.modules)"
    )
    ours = code.format("from octavo.planner import Traffic, plan", "import octavo.planner.report")
    known = code.format(f"import {KNOWN}", "pass")
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}

    def run(code: str) -> tuple[float, str]:
        command = [sys.executable, "-c", code]
        environment = {**os.environ, **bytecode}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        seconds, is_heavy = done.stdout.split()
        return float(seconds), is_heavy

    pairs = [(run(ours), run(known)) for _ in range(5)]  # the first compiles
    mine, theirs = (min(seconds for seconds, _ in runs) for runs in zip(*pairs, strict=True))
    print(f"planner {mine:.3f} s, known modules {theirs:.3f} s")
    assert mine < MOST_IMPORT * theirs
    assert {is_heavy for (_, is_heavy), _ in pairs} == {"False"}


def test_all_names_are_there():
    for name in octavo.planner.__all__:
        assert getattr(octavo.planner, name).__module__.startswith("octavo.planner.")
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        octavo.planner.nothing_of_the_kind  # noqa: B018


def test_a_question_says_its_layout():
    assert Question(model="x").parallel is None
    assert Question(model="x", tp=2, dp=4).parallel.num_devices == 8
