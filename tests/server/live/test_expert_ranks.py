"""A server whose ranks have whole experts: their loads, a placement by these, and the end of a
rank."""

from __future__ import annotations

import signal

import pytest
from live_ranks import BODY, gone, ids_of, signalled, wait_until_restarted

from octavo import cli
from octavo.kernels.cpu import library
from octavo.serving.expert_files import read_loads

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

PROCESS = "octavo.runtime.rank_process"
FLAGS = (
    *("--tensor-parallel-size", "2", "--enable-expert-parallel", "--threads", "2"),
    *("--kernels", "native", "--max-model-len", "256"),
)
# Of one token, as often as there is room: all go to the same two of six experts in each layer.
ONE_SIDED = [
    {"prompt": [token] * 240, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    for token in (5, 5, 5)
]


def unevenness(server) -> float:
    """What the busiest rank has had to do, to the mean of two: 1 is even, 2 is one rank alone."""
    counters = server.counters()
    busiest = counters.sum("expert_busiest_rank_tokens_total")
    return 2 * busiest / counters.sum("expert_rank_tokens_total")


def run_one_sided(server) -> None:
    for body in ONE_SIDED:
        assert ids_of(server.run(server.complete({**body, "return_token_ids": True})))
    server.wait_until_idle()


def test_a_placement_by_the_loads_of_a_server_makes_its_ranks_more_even(
    live_server, tiny_hf, tmp_path
):
    model, loads, placement = (
        tiny_hf("mixtral", max_position_embeddings=256),
        tmp_path / "loads",
        tmp_path / "placement",
    )
    flags = (*FLAGS, "--no-enable-prefix-caching")
    with live_server(model, *flags, "--save-expert-loads", str(loads)) as server:
        run_one_sided(server)
        in_order = unevenness(server)
        counters = server.counters()
        tokens = counters.sum("expert_tokens_total")
        assert tokens == counters.sum("expert_rank_tokens_total")
        assert 0 < counters.sum("expert_rank_tokens_total", rank="0") < tokens
        # Two of six experts have it all; and each of two layers has a series.
        assert counters.sum("expert_imbalance", layer="0") == pytest.approx(3, abs=0.1)
        assert counters.sum("expert_imbalance", layer="1") > 1
        server.stop()
    assert sum(map(sum, read_loads(loads).loads)) == tokens
    assert cli.main(["place-experts", str(loads), str(placement), "--ranks=2", "--slots=4"]) == 0
    with live_server(model, *flags, "--expert-placement", str(placement)) as server:
        run_one_sided(server)
        placed = unevenness(server)
    assert 1 <= placed < 1.1 < in_order


@pytest.fixture(scope="module")
def server(live_server, tiny_hf):
    flags = (*FLAGS, "--resume-streams", "--engine-timeout", "6")
    with live_server(tiny_hf("mixtral", max_position_embeddings=256), *flags) as server:
        yield server


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_on_after_the_end_of_a_rank_with_experts(server, signum):
    """One that stops is ended with its engine, once that has hung for as long as it may."""
    expected = ids_of(server.run(server.complete(BODY)))
    before, (follower,) = server.load()["num_restarts"], server.processes_of(PROCESS)
    assert server.run(signalled(server, PROCESS, signum)) == expected
    gone(follower)
    wait_until_restarted(server, before)
    assert server.load()["num_restarts"] == before + 1
    assert len(server.processes_of(PROCESS)) == 1
