"""Half an hour of dashboard, in a fraction of the time: what the page holds does not grow."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import StepStats
from octavo.server.engine.generation import EngineState, Generation, GenerationRequest
from octavo.server.watch import step_viewer
from octavo.server.watch.snapshot_viewer import SnapshotViewer

pytestmark = pytest.mark.long

SPEED = 25  # times as fast as the clock on the wall
FRAMES = 120  # a minute
MINUTES = 30
# Before any script of the page: its clock and its only timer run faster, and ticks are counted.
FASTER = f"""
    const [later, now] = [setInterval, performance.now.bind(performance)];
    window.ticks = 0;
    window.setInterval = (work, pause) => later(() => {{ ticks += 1; work(); }}, pause / {SPEED});
    performance.now = () => {SPEED} * now();
"""
ABOUT = {
    "model": "steady", "num_blocks": 4096, "block_size": 16, "num_restarts": 0,
    "memory": {"total_bytes": 16 << 30, "kv_bytes": 4 << 30, "lines": []}, "usd_per_hour": [1, 1],
}  # fmt: skip


async def steady_work() -> AsyncIterator[dict[str, Any]]:
    """Events of an engine that makes 80 steps a second of 16 streams, of which each is over after
    some seconds, as the server makes them."""
    viewer = SnapshotViewer(lambda one: None, lambda: ABOUT)
    viewer.put_state(EngineState.READY, "")
    steps = itertools.count()
    async for event in viewer.events():
        yield event
        for _ in range(20):
            take_step(viewer, next(steps))


def take_step(viewer: SnapshotViewer, number: int) -> None:
    running = [f"cmpl-{max(0, number - 40 * age) // 40:024x}" for age in range(16)]
    record = StepStats.idle(4096)
    viewer.put(
        replace(
            record, step_id=number, num_running=16, num_seqs=16, num_tokens=16, seconds=0.0123,
            num_used_blocks=16 * 40, step_seconds=0.0123 * number, prefix_tokens_queried=number,
            prefix_tokens_hit=number // 3, roofline_share=0.61, memory_seconds=0.0075,
            compute_seconds=0.0021 + number % 7 * 1e-4, num_memory_bound=number,
            num_compute_bound=0, num_overhead_bound=0,
        )
    )  # fmt: skip
    for _ in running:
        viewer.put_gap(0.0123 + number % 11 * 1e-4)
    # Each step, so that each frame has as many as it keeps, however slow the browser is.
    rows = [(f"{name}#0", number, 1, 1, 0, 0) for name in running]
    preempted = [rows[0][0]] if number % 90 == 0 else []
    viewer.put_snapshot(number, {"rows": rows, "preempted": preempted})
    if number % 40 == 0:
        viewer.put_snapshot(number, picture(running, number))
        request = GenerationRequest(running[-1], [1, 2, 3], SamplingParams(), 0.0)
        viewer.put_end(Generation(request, lambda one: None), "stop")
        viewer.put_rejection("queue_requests")


def picture(running: list[str], number: int) -> dict[str, Any]:
    runs = [each for index in range(16) for each in (index, 37, -2, 27)]
    runs = [*runs, -1, 2048 - 16 * 64 - number % 9, -2, number % 9]
    pool = {"num_blocks": 4096, "every": 2, "requests": running, "runs": runs}
    prefixes = [(index // 3 - 1, 9, 90 - index, index) for index in range(40)]
    return {"pool": pool, "prefixes": prefixes}


def test_half_an_hour_leaves_nothing_behind(tab, steps, monkeypatch):
    monkeypatch.setattr(step_viewer, "_INTERVAL", step_viewer._INTERVAL / SPEED)
    steps.endless = steady_work
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=FASTER)
    tab.open("engine")
    tab.call("Network.disable")  # it would have each piece of the stream told and kept
    begun, held = time.monotonic(), {}
    for minute in range(5, MINUTES + 1, 5):
        tab.wait_for(f"ticks >= {minute * FRAMES}", timeout=300)
        held[minute] = heap_of(tab)
        print(f"minute {minute}, after {time.monotonic() - begun:.0f} s:", held[minute], flush=True)
    assert tab.js("scrub.max") == "599" and tab.text("#state") == "ready"
    assert tab.js("document.querySelectorAll('#ended tbody tr').length") == 50
    # The five minutes that are kept are full after the first ten at the latest. How much came in
    # each frame of them depends on how busy this machine is, so that what is held varies.
    early, late = ([held[minute][0] for minute in pair] for pair in ((10, 15), (25, 30)))
    assert sum(late) < 1.15 * sum(early), held
    # Nodes that the last ticks took out of the page are still counted: a thousand of each.
    assert held[30][1] < 10_000 and held[30][2] == held[5][2], held


def heap_of(tab) -> tuple[int, int, int]:
    """Bytes, nodes and listeners. The least of a few: what a tick has just taken out of the page
    may still be there."""
    samples = []
    for _ in range(5):
        tab.call("HeapProfiler.collectGarbage")
        heap, counts = tab.call("Runtime.getHeapUsage"), tab.call("Memory.getDOMCounters")
        samples.append((heap["usedSize"], counts["nodes"], counts["jsEventListeners"]))
    return min(samples)
