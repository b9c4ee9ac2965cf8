"""How fast virtual time goes by, beside a plain loop in Python."""

from __future__ import annotations

import time

import pytest
from pace import python_seconds
from simulating import different_asks, fleet_spec

from octavo.sim.prompts import prompts_of_trace
from octavo.sim.simulation import simulate
from octavo.workload.plan import LoadPlan
from octavo.workload.traces import TraceEntry

pytestmark = pytest.mark.timing


def test_hundreds_of_requests_a_second():
    prompts = different_asks(300, 500, 200)
    begin = time.process_time()
    result = simulate(prompts, LoadPlan(None, 64), fleet_spec(num_blocks=8192))
    seconds = time.process_time() - begin
    assert all(record.output_tokens == 200 for record in result.records)
    assert seconds < python_seconds(15e6)  # 400 requests a second where a round takes 50 ns


def test_long_prompts_cost_by_their_blocks():
    """Of a tenth of the requests, with twelve thousand tokens each, half of them shared."""
    entries = [
        TraceEntry(0.3 * i, 12_000, 343, (*range(12), *range(100 + i * 12, 112 + i * 12)))
        for i in range(100)
    ]
    prompts = prompts_of_trace(entries)
    spec = fleet_spec(num_blocks=40_000, max_model_len=16_384, max_num_batched_tokens=8192)
    begin = time.process_time()
    result = simulate(prompts, LoadPlan([prompt.arrival_s for prompt in prompts]), spec)
    assert time.process_time() - begin < python_seconds(2e7)
    assert sum(record.cached_tokens for record in result.records) == 99 * 12 * 512
