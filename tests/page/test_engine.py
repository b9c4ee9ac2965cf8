"""The dashboard in a real browser, fed with events that a test can foresee."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.stats import StepStats
from octavo.page import site
from octavo.server.watch.snapshot_viewer import SnapshotViewer

pytestmark = pytest.mark.slow

MEMORY = {
    "total_bytes": 16 << 30,
    "kv_bytes": 4 << 30,
    "lines": [{"name": "weights", "bytes": 2 << 30, "known": "counted"}],
}
ABOUT = {
    "model": "tiny",
    "num_blocks": 64,
    "block_size": 16,
    "num_restarts": 0,
    "memory": MEMORY,
    "usd_per_hour": None,
}
READY = {"engine": "ready", "detail": "", "about": ABOUT}
FIGURE = "[...document.querySelectorAll('#figures dt')].find((t) => t.innerText === '%s')"


def steps_event(*records: StepStats) -> dict[str, Any]:
    """What the server tells of steps."""

    async def tell() -> dict[str, Any]:
        viewer = SnapshotViewer(lambda one: None, dict)
        for record in records:
            viewer.put(record)
        return await anext(viewer.events())

    return asyncio.run(tell())


def step(number: int, **further: Any) -> StepStats:
    record = replace(
        StepStats.idle(64),
        step_id=number,
        num_running=2,
        num_waiting=1,
        num_tokens=40,
        num_prompt_tokens=32,
        num_used_blocks=16,
        seconds=0.01,
        step_seconds=0.01 * (number + 1),
        prefix_tokens_queried=100,
        prefix_tokens_hit=25,
        roofline_share=0.5,
        memory_seconds=0.005,
        compute_seconds=0.001,
        num_memory_bound=number,
        num_compute_bound=0,
        num_overhead_bound=0,
    )
    return replace(record, **further)


def busy() -> list[dict]:
    """Three steps: a prompt, draft tokens and a plain token; one request has ended."""
    rows = [["aaa#0", 16, 32, 1, 0, 0], ["bbb#0", 40, 1, 3, 4, 2], ["ccc#0", 9, 1, 1, 0, 0]]
    ended = {
        "id": "aaa", "reason": "stop", "num_prompt_tokens": 48, "num_cached_tokens": 16,
        "num_output_tokens": 9, "num_draft_tokens": 4, "num_accepted_tokens": 2, "ttft": 0.25,
        "tpot": 0.02, "e2e": 1.0,
    }  # fmt: skip
    return [
        READY,
        steps_event(*map(step, range(3)))
        | {
            "looks": [{"step_id": 2, "rows": rows, "preempted": ["ddd#0"]}],
            "pool": {
                "num_blocks": 64, "every": 1, "requests": ["aaa#0", "bbb#0"],
                "runs": [0, 4, 1, 2, -3, 1, -2, 9, -1, 48],
            },
            "prefixes": [[-1, 4, 7, 5], [0, 3, 3, 1]],
            "ended": [ended],
            "ttfts": [0.5],
            "gaps": [[114, 90], [130, 10]],
            "rejected": {"queue_requests": 2},
        },
    ]  # fmt: skip


@pytest.fixture
def board(tab, steps):
    steps.events = busy()
    tab.open("engine")
    tab.wait_for_text("#state", "ready")
    return tab


def figure(board, name: str) -> str:
    return board.js(f"{FIGURE % name}.nextSibling.innerText")


def test_each_card_shows_what_came(board):
    board.wait_for_text("#ended", "aaa")
    assert figure(board, "running · waiting") == "2 · 1"
    # Of those whose first token came, whether they have ended or not.
    assert figure(board, "TTFT p50 · p99") == "500 ms · 500 ms"
    assert figure(board, "ITL p50 · p99") == "20.3 ms · 81.4 ms", "the middles of their buckets"
    assert figure(board, "prefix hit rate") == "25%"
    assert "bound by memory" in board.text("#bound")
    assert "2 refused: queue_requests" in board.text("#notes")
    board.wait_for_text(".holders", "free: 48")  # charts and maps are drawn after the figures
    assert "aaa#0: 4" in board.text(".holders")
    assert board.js("document.querySelectorAll('#prefixes .tree .tree li').length") == 1
    assert "64 tokens · 5 hits" in board.text("#prefixes")
    legend = board.text("#batches .chart-legend")
    kinds = (
        "chunk of a prompt",
        "decode",
        "draft tokens, some accepted",
        "draft tokens, all rejected",
    )
    for kind in (*kinds, "preempted"):
        assert kind in legend, "also of what nothing does at the moment"
    assert "weights" in board.text("#memory .chart-legend")
    board.click("#price")
    board.write("3.6")
    board.wait_for_text("#ended", "µ$")


def test_pause_and_the_way_back(board, steps):
    board.wait_for("scrub.max >= 3")
    board.click("#pause")
    steps.events.append(steps_event(step(9, num_running=7)))
    board.js("new Promise((done) => setTimeout(done, 1200))")
    assert figure(board, "running · waiting") == "2 · 1", "time stands still"
    board.js("scrub.value = scrub.max; scrub.dispatchEvent(new Event('input'))")
    board.wait_for("document.getElementById('when').innerText.includes('back')")
    board.click("#pause")
    board.wait_for(f"{FIGURE % 'running · waiting'}.nextSibling.innerText === '7 · 1'")


def test_an_engine_that_restarts_and_a_connection_that_is_lost(board, steps):
    steps.events.append({"engine": "restarting", "detail": "it was killed"})
    board.wait_for_text("#state", "restarting")
    steps.events.append(READY)
    board.wait_for_text("#state", "ready")
    assert "engine restarting: it was killed" in board.text("#notes")
    steps.events = [READY]
    steps.num_cuts += 1
    board.wait_for_text("#notes", "the server ended the stream")
    board.wait_for_text("#state", "ready")
    assert steps.num_viewers == 2


def of_replica(number: int, event: dict[str, Any]) -> dict[str, Any]:
    return {"replica": number, **event}


def test_replicas_are_listed_and_one_is_drawn(board, steps):
    assert board.js("document.getElementById('replicas').closest('section').hidden")
    listed = [
        {"replica": 0, "state": "ready", "requests": 3, "num_running": 2, "num_waiting": 1,
         "kv_usage": 0.25, "num_restarts": 0},
        {"replica": 1, "state": "draining", "requests": 7, "num_running": 5, "num_waiting": 0,
         "kv_usage": 0.5, "num_restarts": 2},
    ]  # fmt: skip
    steps.events += [
        of_replica(0, READY),
        of_replica(1, READY),
        of_replica(0, steps_event(step(4, num_running=3))),
        of_replica(1, steps_event(step(5, num_running=5))),
        {"replicas": listed},
    ]
    board.wait_for_text("#replicas", "draining")
    assert "25%" in board.text("#replicas") and "5 · 0" in board.text("#replicas")
    shown = f"{FIGURE % 'running · waiting'}.nextSibling.innerText"
    board.wait_for(f"{shown} === '3 · 1'")
    board.click("#replicas [aria-label='Show replica 1']")
    board.wait_for(f"{shown} === '5 · 1'")
    assert board.js("document.querySelector('#replicas [aria-pressed=true]').innerText") == "1"
    steps.events.append({"replica": 1, "engine": "removed", "detail": ""})
    board.wait_for(f"{shown} === '3 · 1'")
    board.wait_for_text("#notes", "replica 1 was removed")
    assert "draining" not in board.text("#replicas")


def test_two_viewers_and_a_key(tab_at, site, steps):
    steps.events, steps.api_key = busy(), "secret"
    tabs = [tab_at(site.address) for _ in range(2)]
    for tab in tabs:
        tab.open("engine")
        tab.wait_for("document.getElementById('key-dialog').open")
        tab.click("#key")
        tab.write("secret")
        tab.press("Enter")
        tab.wait_for_text("#state", "ready")
    assert steps.num_viewers == 2


def test_no_pane_is_empty_where_little_is_known(tab, steps):
    steps.events = [READY | {"about": ABOUT | {"memory": None}}]
    tab.open("engine")
    tab.wait_for_text("#model-name", "tiny")
    tab.wait_for_text("#cost", "No request has ended yet.")
    assert not tab.js("document.getElementById('memory').checkVisibility()")
    assert not tab.js("document.getElementById('ended').checkVisibility()")
    cards = "[...document.querySelectorAll('.tile-card')].filter((card) => card.checkVisibility())"
    tab.wait_for("document.querySelectorAll('#queue text').length")  # charts are drawn at last
    titles = tab.js(f"{cards}.map((card) => card.querySelector('h2, figcaption').innerText)")
    assert len(titles) == 8 and all(titles)
    ticks = tab.js("[...document.querySelectorAll('#queue text')].map((text) => text.textContent)")
    assert {"0", "1"} <= set(ticks) and "0.5" not in ticks
    # Of a device whose ceilings are not measured, it is known what the engine holds.
    unmeasured = MEMORY | {"total_bytes": None}
    steps.events.append(READY | {"about": ABOUT | {"memory": unmeasured}})
    tab.wait_for_text("#memory .chart-legend", "KV cache")
    assert "not octavo's" not in tab.text("#memory .chart-legend")


def test_nobody_is_kept_out(board):
    board.wait_for_text("#ended", "aaa")
    assert board.barriers() == []
    assert board.lost_steps() == []


def test_all_that_can_be_used_has_a_name(board):
    names = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in board.call("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and node["role"]["value"] in ("button", "slider", "textbox")
    ]
    assert ("slider", "Back in time") in [(role, name[:12]) for role, name in names]
    assert len(names) >= 4 and all(name for _, name in names)


def test_the_dashboard_is_small():
    assert sum(file.stat().st_size for file in (site.STATIC / "engine").iterdir()) <= 40_000
