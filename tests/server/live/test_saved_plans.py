"""A server is started with the very file that a plan has saved."""

from __future__ import annotations

import json

import pytest

from octavo.cli import main


@pytest.mark.parametrize(
    ("name", "layout", "followers"),
    [("server.yaml", "--tp 2", 1), ("server.toml", "--tp 2 --pp 2", 3)],
)
def test_a_server_is_as_it_was_planned(live_server, tiny_model, tmp_path, name, layout, followers):
    path = tmp_path / name
    asked = "--hardware epyc-turin:4 --concurrency 3 --isl 64 --osl 16 --kv-cache-dtype int8"
    limits = "--max-num-seqs 5 --max-model-len 200 --max-num-batched-tokens 64"
    flags = f"{asked} {layout} {limits}".split()
    assert main(["plan", str(tiny_model), *flags, "--save", str(path)]) == 0
    with live_server(tiny_model, "--config", str(path), "--threads", "4") as server:
        ranks = server.processes_of("octavo.runtime.rank_process")
        replicas = len(server.engine_pids())
        assert len(ranks) == followers * replicas  # beside the last stage's rank 0 of each
        found = server.run(_settings(server))
        server.stop()
    assert found["settings"] == {"max_model_len": 200, "max_num_seqs": 5, "step_tokens": 64}
    assert found["answer"].status == 200


async def _settings(server) -> dict:
    deployment = json.loads((await server.ask("/octavo/deployment")).body)
    asked = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    answer = await server.ask("/v1/completions", asked)
    return {"settings": deployment["settings"], "answer": answer}
