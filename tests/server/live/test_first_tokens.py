"""First tokens that come in time: what is predicted of them, and requests refused because of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.cost import this_machine

SLOW, STEP = 200, 0.2  # a prompt with this token makes each step take so much longer
BOUND = 1.1
CEILINGS = {"bytes_per_s": 10e9, "int8_per_s": 1e11, "fp16_per_s": 5e10, "fp32_per_s": 5e10}


@pytest.fixture(params=["measured", "unknown"])
def server(request, live_server, tiny_model, tmp_path, monkeypatch):
    """On a machine whose ceilings were measured before, and on one of which nothing is known."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    if request.param == "measured":
        monkeypatch.setattr(this_machine, "_measure", lambda: CEILINGS)
        monkeypatch.setattr(this_machine.machine, "has_gpu_driver", lambda: False)
        this_machine.this_machine()
    flags = ("--max-predicted-ttft", f"{BOUND}s", "--max-num-batched-tokens", "64")
    flags = (*flags, "--device", "cpu", "--no-enable-prefix-caching")
    with live_server(tiny_model, *flags, faults={"slow": SLOW}) as server:
        server.is_measured = request.param == "measured"
        yield server


def slow_prompt(number: int) -> dict[str, Any]:
    """A whole step of it."""
    return {"prompt": [SLOW, *range(number, number + 63)], "max_tokens": 1, "temperature": 0}


@pytest.mark.timing
def test_those_who_are_let_in_do_not_wait_too_long(server):
    steps = []
    for number in range(3):  # from which it learns how slow this engine is
        answer = server.fetch("/v1/completions", slow_prompt(number))
        assert answer.status == 200
        steps.append(answer.seconds)

    async def burst() -> list[Any]:
        bodies = [slow_prompt(10 + number) for number in range(20)]
        return await asyncio.gather(*(server.ask("/v1/completions", body) for body in bodies))

    answers = server.run(burst())
    accepted = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 503]
    assert len(accepted) + len(refused) == 20 and len(accepted) >= 3 and len(refused) >= 10
    for answer in refused:
        assert "the first token is predicted to take" in answer.error["message"]
        assert int(answer.headers["retry-after"]) >= 1
    seconds = [answer.seconds for answer in accepted]
    print(f"{len(accepted)} were let in, and had their tokens after {max(seconds):.2f} s")
    assert max(seconds) < BOUND + 3 * max(steps)
    _check_counters(server, len(accepted), len(refused))


def _check_counters(server, num_accepted: int, num_refused: int) -> None:
    counters = server.counters()
    assert counters.sum("admission_rejections_total", reason="predicted_ttft") == num_refused
    predicted = counters.sum("predicted_time_to_first_token_seconds_count")
    assert num_accepted <= predicted <= num_accepted + 3
    right = counters.sum("time_to_first_token_prediction_ratio_bucket", le="1.5")
    assert right >= num_accepted / 2
    named = {sample.name for sample in counters.samples}
    assert ("octavo_step_floor_seconds_total" in named) == server.is_measured
    log = "\n".join(server.log)
    if server.is_measured:
        assert "steps are predicted by the roofline" in log
        assert 0 < server.load()["roofline_share"] < 1
    else:
        assert "`octavo hardware show auto` does it" in log
        assert server.load()["roofline_share"] is None
