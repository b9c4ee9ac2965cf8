"""Reference case R18: 300 requests of ShareGPT, ten a second, against vLLM on the same requests.

``sharegpt_llama_300.jsonl`` has the arrivals and lengths of
https://github.com/casys-kaist/LLMServingSim (MIT), ``bench/examples/RTX4090/Llama-3.1-8B``, whose
summaries the figures are of. All are faster than what they are asked: capacity decides.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cost.open_spec import open_spec
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
