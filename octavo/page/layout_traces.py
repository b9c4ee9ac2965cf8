"""Traces of pipelines, of tensor parallelism and of experts, with every step of the scheduler.

The scheduler is the engine's own, in virtual time, and stages are followed one by one. One JSON::

    {made: {version, date}, cases: [{layout, load, model, hardware, kind, ranks, requests, seconds,
     alone, steps}]}

``kind`` is pipeline, tensor or experts; ``ranks`` how many stages or ranks there are. ``seconds``
is when the last answer was there, ``alone`` the same of one rank that has all of the requests. A
step is ``[begun, ended, prompt tokens, requests that decode, parts]``, with the ``parts`` of its
kind:

    pipeline    [[begun, ended] of each stage]
    tensor      [seconds in which ranks exchange results]
    experts     [seconds of exchange, seconds of experts on the busiest rank,
                 [uses of experts on each rank, in one layer]]

No model runs, so that nothing is known of what tokens would choose: uses are drawn at random, each
expert as likely as another.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import cache
from itertools import product
from random import Random
from typing import Any, NamedTuple

import octavo
from octavo.core.batch import Batch
from octavo.cost.catalogue import spec_of
from octavo.cost.find_device import find_device
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.cost.rank import rank_model
from octavo.cost.rank_model import Experts
from octavo.cost.step_cost import StepModel
from octavo.sim import FleetSettings, LoadSettings, Workload, prepare
from octavo.sim.replica import ReplicaStepTimes


class _Layout(NamedTuple):
    kind: str
    model: str
    hardware: str
    parallel: Parallel

    @property
    def ranks(self) -> int:
        return self.parallel.num_devices


_SMALL, _LARGE = ("llama-3.1-8b", "h100-sxm"), ("mixtral-8x7b", "h200")
LAYOUTS = {
    "pp 2": _Layout("pipeline", *_SMALL, Parallel(pp=2)),
    "pp 4": _Layout("pipeline", *_SMALL, Parallel(pp=4)),
    "tp 2": _Layout("tensor", *_SMALL, Parallel(tp=2)),
    "tp 4": _Layout("tensor", *_SMALL, Parallel(tp=4)),
    "ep 4": _Layout("experts", *_LARGE, Parallel(tp=4, ep=4)),
}
# Requests, tokens of their prompts, and of their answers.
LOADS = {
    "prompts": (12, 1500, 2),
    "both": (12, 700, 16),
    "answers": (16, 16, 24),
    "alone": (1, 4000, 8),
}


@cache
def layout_traces() -> dict[str, Any]:
    """Return all traces; takes some seconds at most."""
    return {
        "made": {"version": octavo.__version__, "date": date.today().isoformat()},
        "cases": [_case(*each) for each in product(LAYOUTS, LOADS)],
    }


def _case(name: str, load: str) -> dict[str, Any]:
    layout = LAYOUTS[name]
    seconds, times = _run(layout, load, layout.parallel)
    alone, _ = _run(layout, load, Parallel())
    parts = _Parts(layout)
    return {
        "layout": name,
        "load": load,
        "model": layout.model,
        "hardware": layout.hardware,
        "kind": layout.kind,
        "ranks": layout.ranks,
        "requests": LOADS[load],
        "seconds": _rounded(seconds),
        "alone": _rounded(alone),
        "steps": [_step(each, parts) for each in times],
    }


def _run(
    layout: _Layout, load: str, parallel: Parallel
) -> tuple[float, Sequence[ReplicaStepTimes]]:
    count, input_len, output_len = LOADS[load]
    workload = Workload(num_prompts=count, input_len=input_len, output_len=output_len, seed=3)
    hardware = f"{layout.hardware}:{parallel.num_devices}"
    fleet = FleetSettings(hardware=hardware, tp=parallel.tp, pp=parallel.pp, ep=parallel.ep)
    times: list[ReplicaStepTimes] = []
    result = prepare(layout.model, fleet, workload, LoadSettings()).run(watch=times.append).result
    return result.makespan_s, times


class _Parts:
    """The parts of the steps of a layout."""

    def __init__(self, layout: _Layout):
        device, _ = find_device(layout.hardware)
        spec = spec_of(layout.model)
        rank = rank_model(spec, precision_of(spec), layout.parallel)
        self._kind, self._ranks = layout.kind, layout.ranks
        self._steps = StepModel.of(rank, device)
        self._experts = next((op.experts for op in rank.matrices if op.experts), None)
        self._draws = Random(7)

    def of(self, times: ReplicaStepTimes) -> list[Any]:
        if self._kind == "pipeline":
            return [[_rounded(span.begun), _rounded(span.ended)] for span in times.stages]
        batch = times.step.batch
        cost = self._steps.cost(batch.items, batch.num_multi_steps)
        exchange = _rounded(cost.comm.value)
        if self._experts is None:
            return [exchange]
        seconds = sum(op.seconds for op in cost.ops if op.name.startswith("experts"))
        return [exchange, _rounded(seconds), self._loads(batch, self._experts)]

    def _loads(self, batch: Batch, experts: Experts) -> list[int]:
        loads = [0] * self._ranks
        for _ in range(sum(item.num_tokens for item in batch.items)):
            for expert in self._draws.sample(range(experts.total), experts.per_token):
                loads[expert * self._ranks // experts.total] += 1
        return loads


def _step(times: ReplicaStepTimes, parts: _Parts) -> list[Any]:
    prompt_tokens = decoding = 0
    for item in times.step.batch.items:
        if item.start < item.request.num_prompt_tokens:
            prompt_tokens += item.num_tokens
        else:
            decoding += 1
    begun = times.stages[0].begun if times.stages else times.begun
    ended = times.stages[-1].ended if times.stages else times.ended
    return [_rounded(begun), _rounded(ended), prompt_tokens, decoding, parts.of(times)]


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
