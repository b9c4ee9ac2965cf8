"""Settings, and what is made of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.core.routing import ROUTERS
from octavo.cost.open_spec import open_spec
from octavo.sim.router import ORACLE
from octavo.sim.settings import ROUTER_NAMES, ClientSettings, FleetSettings, Outage
from octavo.sim.setup import prepare
from octavo.workload.settings import LoadSettings, Workload
from octavo.workload.traces import TraceEntry, write_trace

SMALL = Workload(num_prompts=20, input_len=200, output_len=20)


def prepared(model="llama-3.1-8b", engine=None, clients=None, workload=SMALL, load=None, **fleet):
    fleet.setdefault("hardware", "h100-sxm")
    return prepare(
        open_spec(model),
        FleetSettings(**fleet),
        workload,
        load or LoadSettings(request_rate=10.0),
        engine=engine,
        clients=clients,
    )


def test_a_simulation_is_what_was_asked_for():
    made = prepared(hardware="h100-sxm:4", replicas=2, profile="vllm")
    config = made.fleet.replica.config
    assert (made.setting["tp"], made.setting["devices"]) == (2, 4)
    assert config.scheduler.max_num_seqs == 1024 and config.scheduler.max_queued_requests is None
    assert config.scheduler.target_step_seconds == 0.0
    assert made.setting["kv_blocks"] == config.cache.num_blocks > 40_000
    ours = prepared(engine={"max_num_seqs": 7, "num_blocks": 500}).fleet.replica.config
    assert ours.scheduler.target_step_seconds == 0.08  # as in a server
    assert (ours.scheduler.max_num_seqs, ours.cache.num_blocks) == (7, 500)
    assert ours.scheduler.max_model_len == 8000  # that fit into the pool


@pytest.mark.parametrize(
    "said, devices, engines, layout",
    [
        ({}, 8, 1, "tp 8"),
        ({"tp": 2}, 8, 4, "tp 2, 4 replicas"),
        ({"pp": 2}, 8, 1, "tp 4, pp 2"),
        ({"tp": 2, "replicas": 3}, 6, 3, "tp 2, 3 replicas"),
        ({"tp": 1, "dp": 4}, 8, 8, "dp 4, 2 replicas"),
    ],
)
def test_what_is_left_of_the_devices_makes_replicas(said, devices, engines, layout):
    made = prepared(hardware="h100-sxm:8", **said)
    assert made.setting["devices"] == devices and made.setting["layout"] == layout
    assert made.fleet.num_replicas == engines


def test_faster_hardware_is_faster_and_more_of_it_too():
    means = {}
    for name, fleet in {
        "a100": {"hardware": "a100-80gb-sxm"},
        "h100": {},
        "h100 x 2": {"hardware": "h100-sxm:2"},
        "int4": {"quantization": "int4"},
    }.items():
        report = prepared(**fleet, profile="vllm").run()
        means[name] = report.as_json()["mean_tpot_ms"]
    assert means["a100"] > means["h100"] > means["h100 x 2"]
    assert means["h100"] > means["int4"]


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="does not fit RTX 4090"):
        prepared("llama-3.1-70b", hardware="rtx-4090")
    with pytest.raises(ConfigError, match="3 devices cannot be shared out by replicas = 2, pp = 1"):
        prepared(hardware="h100-sxm:3", replicas=2)
    with pytest.raises(ConfigError, match="6 devices cannot be shared out by tp = 4"):
        prepared(hardware="h100-sxm:6", tp=4)
    with pytest.raises(ConfigError, match="8 devices are needed, and --hardware has 4"):
        prepared(hardware="h100-sxm:4", replicas=2, tp=4)


def test_the_engine_of_a_trace_hears_of_its_sessions_and_priorities(tmp_path):
    entries = [
        TraceEntry(0.0, 600, 10, (0, 1), session_id="a", turn=1, priority=3),
        TraceEntry(1.0, 700, 10, (0, 1), session_id="a", turn=2, think_ms=250.0),
    ]
    path = tmp_path / "trace.jsonl"
    write_trace(path, "octavo", entries)
    workload = Workload(output_len=5)
    made = prepared(clients=ClientSettings(trace=str(path)), workload=workload, load=LoadSettings())
    assert [(prompt.priority, prompt.follows, prompt.output_len) for prompt in made.prompts] == [
        (3, None, 5),
        (0, "0", 5),
    ]
    named = replace(workload, dataset_name="mooncake", dataset_path=str(path))
    assert prepared(workload=named, load=LoadSettings()).prompts == made.prompts
    first, second = made.run().report.records
    assert second.scheduled == first.ended + 0.25 and second.cached_tokens == 592
    with pytest.raises(ConfigError, match="dataset-path"):
        prepared(workload=replace(named, dataset_path=None))


def test_clients_have_conversations_and_no_patience():
    clients = ClientSettings(turns=4, think_time=1.0, patience=30.0)
    made = prepared(clients=clients)
    assert sum(prompt.follows is None for prompt in made.prompts) == len(made.plan.times) == 5
    document = made.run().as_json()
    assert document["completed"] == 20
    # Turns after the first have all that was said before in the cache.
    assert document["simulation"]["prefix_hit_rate"] > 0.5
    assert {prompt.patience_s for prompt in made.prompts} == {30.0}


@pytest.mark.parametrize(
    "arrival, shape", [("poisson", 1.0), ("constant", math.inf), ("gamma", 0.5)]
)
def test_arrivals_by_name(arrival, shape):
    load = LoadSettings(request_rate=5.0, burstiness=0.5 if arrival == "gamma" else 1.0)
    assert ClientSettings(arrival=arrival).load(load).burstiness == shape


def test_prompts_apart_take_time_to_travel():
    slow, fast = (
        prepared(replicas=2, prefill_replicas=1, transfer_gb_s=rate, max_local_prefill_length=0)
        .run()
        .report.records[0]
        for rate in (0.1, 100.0)
    )
    kv_bytes = 2 * 8 * 128 * 2 * 32 * 200
    expected = kv_bytes / 0.1e9 - kv_bytes / 100e9
    assert slow.itls[0] - fast.itls[0] == pytest.approx(expected, abs=1e-6)


def test_prompts_stay_where_their_kv_would_take_longer_to_come():
    made = prepared(replicas=2, prefill_replicas=1, transfer_gb_s=0.1)
    roles = made.run().as_json()["simulation"]["roles"]
    assert roles["prefill"]["busy"] == 0.0 and roles["decode"]["busy"] > 0.5
    assert roles["prefill"]["p50_ttft_ms"] and roles["decode"]["p99_tpot_ms"]
    assert "prefill: 1 replicas, 0% busy; TTFT" in made.run().as_text()


def test_routers_have_the_names_that_flags_know():
    assert (*ROUTERS, ORACLE) == ROUTER_NAMES


def test_outages_are_read():
    settings = FleetSettings(replicas=2, fail=("0@30", "1@2.5+10"))
    assert settings.outages == (Outage(0, 30.0), Outage(1, 2.5, 10.0))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FleetSettings(fail=("zero",)), "no outage: write 0@30"),
        (lambda: FleetSettings(replicas=0), "replicas must be at least 1"),
        (lambda: FleetSettings(transfer_gb_s=10.0), "without prefill_replicas"),
        (lambda: FleetSettings(max_local_prefill_length=1), "without prefill_replicas"),
        (
            lambda: FleetSettings(prefill_replicas=1, max_local_prefill_length=-1),
            "max_local_prefill_length must be at least 0",
        ),
        (lambda: FleetSettings(prefill_replicas=1, transfer_gb_s=0.0), "above 0"),
        (lambda: ClientSettings(turns=0), "turns must be at least 1"),
        (lambda: ClientSettings(think_time=1.0), "give turns"),
        (lambda: ClientSettings(turns=2, think_time=-1.0), "think_time"),
        (lambda: ClientSettings(patience=0.0), "patience"),
        (lambda: ClientSettings(arrival="poisson").load(LoadSettings()), "request_rate"),
        (
            lambda: ClientSettings(arrival="constant").load(
                LoadSettings(request_rate=1.0, burstiness=0.5)
            ),
            "contradict",
        ),
        (lambda: prepared(hardware="h1000"), "h1000"),
        (lambda: prepared(router="fastest"), "no router"),
        (lambda: prepared(engine={"batching": "none"}), "batching must be one of"),
        (lambda: prepared(workload=replace(SMALL, dataset_name="sharegpt")), "needs a file"),
    ],
)
def test_what_is_wrong_is_said(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_ranks_on_processors_have_kv_of_the_heads_that_they_read():
    """Of 3 KV heads two at most."""
    load, engine = LoadSettings(request_rate=1.0), {"kv_cache_memory": 1 << 28}
    one, two = (
        prepared("smollm2-135m", engine, load=load, hardware="xeon-spr", tp=tp) for tp in (1, 2)
    )
    assert (two.setting["layout"], two.setting["devices"]) == ("tp 2", 2)
    assert two.setting["kv_blocks"] == one.setting["kv_blocks"] * 3 // 2
