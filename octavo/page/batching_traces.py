"""Traces of static and continuous batching, with every step of the scheduler in virtual time.

The scheduler is the engine's own, and both kinds of batching get the same requests. One JSON::

    {made: {version, date}, model, hardware, cases: [{lengths, slots, arrivals, requests, runs}]}

A request is ``[arrival, prompt, answer]``, in seconds and tokens, and has its place as its number.
``runs`` are by the name of their batching, and each is ``{seconds, ttft, steps}``: when the last
answer was there, when each request had its first token, counted from its arrival, and of each
step::

    [begun, ended, [[number, tokens of its prompt], ...], [numbers that decode], waiting, preempted,
     share of the KV pool that is held]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from functools import cache
from itertools import product
from typing import Any

import octavo
from octavo.sim import FleetSettings, LoadSettings, Workload, prepare
from octavo.sim.replica import ReplicaStepTimes
from octavo.sim.request import SimRequest

MODEL, HARDWARE = "llama-3.1-8b", "h100-sxm"
# Lengths differ by this share of their mean (standard deviation, log-normal).
LENGTHS = {"alike": 0.0, "mixed": 0.6, "very mixed": 1.2}
SLOTS = (4, 8)
ARRIVALS = {"at once": math.inf, "one by one": 60.0}  # requests a second, drawn as Poisson's
BATCHINGS = ("static", "continuous")

_NUM_REQUESTS = 12


@cache
def batching_traces() -> dict[str, Any]:
    """Return all traces; takes some seconds at most."""
    return {
        "made": {"version": octavo.__version__, "date": date.today().isoformat()},
        "model": MODEL,
        "hardware": HARDWARE,
        "cases": [_case(*each) for each in product(LENGTHS, SLOTS, ARRIVALS)],
    }


def _case(lengths: str, slots: int, arrivals: str) -> dict[str, Any]:
    case: dict[str, Any] = {"lengths": lengths, "slots": slots, "arrivals": arrivals, "runs": {}}
    workload = Workload(
        num_prompts=_NUM_REQUESTS,
        random_input_len=200,
        random_output_len=24,
        random_length_cv=LENGTHS[lengths],
        seed=3,
    )
    load = LoadSettings(request_rate=ARRIVALS[arrivals])
    for batching in BATCHINGS:
        engine = {"batching": batching, "max_num_seqs": slots}
        requests, case["runs"][batching] = _run(workload, load, engine)
        case["requests"] = [_request(request) for request in requests]
    return case


def _run(
    workload: Workload, load: LoadSettings, engine: dict[str, Any]
) -> tuple[Sequence[SimRequest], dict[str, Any]]:
    fleet = FleetSettings(hardware=HARDWARE, tp=1)
    simulation = prepare(MODEL, fleet, workload, load, engine=engine)
    steps: list[ReplicaStepTimes] = []
    result = simulation.run(watch=steps.append).result
    numbers = {each.prompt.request_id: each.number for each in result.requests}
    return result.requests, {
        "seconds": _rounded(result.makespan_s),
        "ttft": [_rounded(request.record.ttft) for request in result.requests],
        "steps": [_step(times, numbers) for times in steps],
    }


def _request(request: SimRequest) -> list[float]:
    prompt = request.prompt
    return [_rounded(request.record.sent), prompt.input_len, prompt.output_len]


def _step(times: ReplicaStepTimes, numbers: dict[str, int]) -> list[Any]:
    prompts, decoding = [], []
    for item in times.step.batch.items:
        number = numbers[item.request.request_id]
        if item.start < item.request.num_prompt_tokens:
            prompts.append([number, item.num_tokens])
        else:
            decoding.append(number)
    stats = times.step.stats
    preempted = [numbers[name] for name in times.step.batch.preempted_ids]
    held = round(stats.kv_utilisation, 6)
    begun, ended = _rounded(times.begun), _rounded(times.ended)
    return [begun, ended, prompts, decoding, stats.num_waiting, preempted, held]


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
