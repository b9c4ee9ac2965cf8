"""Tenants of a trace: production's fair queue decides, and the report tells what each got."""

from __future__ import annotations

import json

import pytest

from octavo.sim import ClientSettings, FleetSettings, LoadSettings, Workload, prepare


def simulated(tmp_path, tenants: bool):
    """A flood of 300 requests at once, and a quiet one of ten, a second later."""
    rows = [(0.0, "flood")] * 300 + [(1000.0 + number, "quiet") for number in range(10)]
    lines = [
        {"timestamp": at, "input_length": 500, "output_length": 100}
        | ({"tenant": name} if tenants else {})
        for at, name in rows
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return prepare(
        "llama-3.1-8b",
        FleetSettings(hardware="h100-sxm"),
        Workload(num_prompts=len(rows)),
        LoadSettings(),
        engine={"max_num_seqs": 16},
        clients=ClientSettings(trace=str(path)),
    ).run()


def last_seconds(report) -> float:
    quiet = [request for request in report.result.requests if request.number >= 300]
    return max(request.record.ended for request in quiet)


def test_a_flood_of_one_tenant_leaves_another_its_share(tmp_path):
    fair, unfair = simulated(tmp_path, tenants=True), simulated(tmp_path, tenants=False)
    assert fair.result.makespan_s == pytest.approx(unfair.result.makespan_s, rel=0.05)
    assert last_seconds(fair) < 0.5 * last_seconds(unfair)
    flood, quiet = fair.as_json()["simulation"]["tenants"]
    assert (flood["tenant"], flood["completed"], flood["total_output_tokens"]) == (
        "flood",
        300,
        30_000,
    )
    assert (quiet["tenant"], quiet["completed"], quiet["failed"]) == ("quiet", 10, 0)
    assert quiet["token_share"] == pytest.approx(10 / 310)
    assert quiet["ttft_ms"]["p99"] < flood["ttft_ms"]["median"]
    assert fair.as_text().splitlines()[-1].startswith("quiet")


def test_without_tenants_nothing_is_said_of_them(tmp_path):
    report = simulated(tmp_path, tenants=False)
    assert report.as_json()["simulation"]["tenants"] == []
    assert "tenant" not in report.as_text()
