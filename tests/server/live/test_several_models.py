"""A server of two models as people run it: each in a process of its own, within a budget."""

from __future__ import annotations

import asyncio

import pytest
from live_server import COMPLETIONS

pytestmark = pytest.mark.xdist_group("several-models")


def asking(model: str, **fields) -> dict:
    return {"model": model, "prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, **fields}


def test_one_model_takes_the_place_of_another_when_its_requests_are_over(
    live_server, tiny_model, tmp_path
):
    other = tmp_path / "other"
    other.symlink_to(tiny_model)
    file = tmp_path / "server.yaml"
    file.write_text(f"models: [{{model: {other}, name: second, kv-cache-memory: 2MiB}}]")
    flags = ("--config", str(file), "--model-memory", "6MiB", "--kv-cache-memory", "3MiB")
    with live_server(tiny_model, *flags) as server:
        first = tiny_model.name
        assert server.fetch("/health").json()["models"] == {first: "loaded", "second": "unloaded"}
        assert len(server.engine_pids()) == 1

        async def main():
            stream = await server.stream(asking(first, max_tokens=100, stream=True))
            await stream.next()
            waiting = asyncio.create_task(server.ask(COMPLETIONS, asking("second", max_tokens=2)))
            await stream.rest()
            assert (stream.finish_reasons, stream.errors) == (["length"], [])
            assert (await waiting).json()["model"] == "second"

        server.run(main())
        assert server.fetch("/health").json()["models"] == {first: "unloaded", "second": "loaded"}
        assert len(server.engine_pids()) == 1
        assert any("second is loaded after" in line for line in server.log)
        server.stop()
