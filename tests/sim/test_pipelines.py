"""The worth of the stages of a pipeline, simulated with the engine's own scheduler."""

from __future__ import annotations

import pytest

from octavo.sim import FleetSettings, LoadSettings, Workload, prepare


def run(pp: int, workload: Workload) -> dict:
    fleet = FleetSettings(hardware=f"h100-sxm:{pp}", pp=pp)
    return prepare("llama-3.1-8b", fleet, workload, LoadSettings()).run().as_json()


def test_requests_that_start_together_use_all_stages():
    """They would stay in one step, and four stages be as fast as one (18,795 tokens/s)."""
    workload = Workload(num_prompts=256, input_len=8, output_len=64)
    one, four = (run(pp, workload)["output_throughput"] for pp in (1, 4))
    assert four > 1.4 * one


def test_chunks_of_a_long_prompt_are_in_several_stages_at_once():
    """A fourth of the time would be the least; a whole prompt in each stage in turn takes all of
    it."""
    workload = Workload(num_prompts=1, input_len=8192, output_len=2)
    one, four = (run(pp, workload)["mean_ttft_ms"] for pp in (1, 4))
    assert one / 4 < four < 0.5 * one


@pytest.mark.parametrize("pp", [2, 4])
def test_a_request_alone_decodes_no_faster(pp):
    workload = Workload(num_prompts=1, input_len=8, output_len=50)
    one, more = (run(each, workload)["mean_tpot_ms"] for each in (1, pp))
    assert more == pytest.approx(one, rel=0.1)
