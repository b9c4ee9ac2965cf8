"""What an engine that is killed has stored, the next one of the same server finds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from live_server import COMPLETIONS

import octavo

pytestmark = [pytest.mark.slow, pytest.mark.network]


def test_the_engine_after_one_that_was_killed(live_server, smollm2_gguf, tmp_path):
    prompt = (Path(octavo.__file__).parent / "quantize" / "calibration_text.txt").read_text()[:4000]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    folder = tmp_path / "kv"
    with live_server(smollm2_gguf, "--kv-offload", f"{folder}:100MiB") as server:

        def ask() -> tuple[str, int]:
            answer = server.fetch(COMPLETIONS, body).json()
            usage = answer["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return answer["choices"][0]["text"], cached

        cold, num_cached = ask()
        assert num_cached == 0
        num_files = -1
        while num_files != (found := len(list(folder.glob("??/*")))) or not found:
            num_files = found
            time.sleep(0.3)  # it saves what it has while there are no requests
        before = server.engine_pid
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while server.engine_pids() in ([], [before]) or server.fetch("/health").status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        warm, num_cached = ask()
        assert warm == cold and num_cached >= 16 * (num_files - 1)
        metrics = server.fetch("/metrics?names=plain").body.decode()
        assert "octavo_prefix_cache_restored_tokens_total{" in metrics
        server.stop()
