"""A server is started with the very file that a plan has saved."""

from __future__ import annotations

import json

import pytest

from octavo.cli import main


@pytest.mark.parametrize("name", ["server.yaml", "server.toml"])
def test_a_server_is_as_it_was_planned(live_server, tiny_model, tmp_path, name):
    path = tmp_path / name
    asked = "--hardware epyc-turin --tp 2 --concurrency 3 --isl 64 --osl 16 --kv-cache-dtype int8"
    limits = "--max-num-seqs 5 --max-model-len 200 --max-num-batched-tokens 64"
    arguments = [*asked.split(), *limits.split(), "--save", str(path)]
    assert main(["plan", str(tiny_model), *arguments]) == 0
    with live_server(tiny_model, "--config", str(path), "--threads", "2") as server:
        assert len(server.processes_of("octavo.runtime.rank_process")) == 1  # beside rank 0
        found = server.run(_settings(server))
        server.stop()
    assert found["settings"] == {"max_model_len": 200, "max_num_seqs": 5, "step_tokens": 64}
    assert found["answer"].status == 200


async def _settings(server) -> dict:
    deployment = json.loads((await server.ask("/octavo/deployment")).body)
    asked = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    answer = await server.ask("/v1/completions", asked)
    return {"settings": deployment["settings"], "answer": answer}
