"""Runs of other engines, and what no run can beat.

Reference case R18 is 300 requests of ShareGPT, ten a second, on vLLM.
``sharegpt_llama_300.jsonl`` has the arrivals and lengths of
https://github.com/casys-kaist/LLMServingSim (MIT), ``bench/examples/RTX4090/Llama-3.1-8B``, whose
summaries the figures are of. All are faster than what they are asked: capacity decides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cost.efficiency import IDEAL
from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.cost.precision import precision_of
from octavo.cost.rank import rank_model
from octavo.cost.step_cost import StepModel
from octavo.cost.work import Span
from octavo.planner import Traffic, plan
from octavo.sim.settings import ClientSettings, FleetSettings
from octavo.sim.setup import prepare
from octavo.workload.settings import LoadSettings, Workload

TRACE = Path(__file__).with_name("sharegpt_llama_300.jsonl")


@pytest.mark.parametrize(
    ("hardware", "max_num_seqs", "ttft_ms", "tpot_ms", "e2e_ms"),
    [
        ("rtx4090", None, 65_456.6, 32.4, 86_578.3),
        # Requests waited though their keys and values would have had room: 128 ran at once.
        ("rtx-pro-6000", 128, 7_097.2, 32.5, 28_200.7),
    ],
)
def test_a_run_of_vllm_is_foreseen(hardware, max_num_seqs, ttft_ms, tpot_ms, e2e_ms):
    simulation = prepare(
        open_spec("llama-3.1-8b"),
        FleetSettings(hardware=hardware, profile="vllm"),
        Workload(),
        LoadSettings(),
        engine={"max_num_seqs": max_num_seqs} if max_num_seqs else None,
        clients=ClientSettings(trace=str(TRACE)),
    )
    found = simulation.run().as_json()
    assert found["mean_ttft_ms"] == pytest.approx(ttft_ms, rel=0.15)
    assert found["mean_tpot_ms"] == pytest.approx(tpot_ms, rel=0.1)
    assert found["mean_e2el_ms"] == pytest.approx(e2e_ms, rel=0.1)


@settings(max_examples=15, deadline=None)
@given(
    model=st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-4b"]),
    hardware=st.sampled_from(["h100-sxm", "a100-80-sxm", "mi300x"]),
    engine=st.sampled_from(["octavo", "vllm", "vllm-0.22", "llama.cpp"]),
    concurrency=st.integers(1, 16),
    input_len=st.integers(1, 3000),
    output_len=st.integers(2, 60),
)
def test_no_plan_and_no_simulation_beats_the_roof(
    model, hardware, engine, concurrency, input_len, output_len
):
    """Streams that go on together are no faster than steps that reach every ceiling."""
    spec = open_spec(model)
    rank = rank_model(spec, precision_of(spec))
    ideal = StepModel(rank, find_device(hardware)[0], IDEAL)
    least = ideal.cost([Span(input_len, 1)] * concurrency).total.value
    roof = concurrency / least
    traffic = Traffic(input_len, output_len, concurrency=concurrency)
    planned = plan(model, hardware, traffic, engine=engine).service
    assert planned.requests_per_second.value * output_len <= roof
    simulation = prepare(
        spec,
        FleetSettings(hardware=hardware, profile=engine),
        Workload(num_prompts=concurrency, input_len=input_len, output_len=output_len),
        LoadSettings(max_concurrency=concurrency),
    )
    found = simulation.run().as_json()
    assert found["output_throughput"] <= roof
