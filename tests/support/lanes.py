"""Which process runs which tests: several side by side, and at last one alone.

The tests of a file are one lane: they run in their order, in one process. So do all that have the
same mark ``xdist_group``, because they share a server or a model. Those marked ``timing`` begin
when everything else is done and all processes but one have ended, and one that fails is tried
again: what the code did wrong it does wrong each time, what the machine did it does not. Without
``-n`` there is only one process, and they are just the last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

MAX_WORKERS = 8  # each imports everything, and the longest lane is one piece
WORKER_BYTES = 3 << 30  # for a model or two, and the other implementation of them
RERUNS = 2  # of a test that compares times
# Roughly, of a test: one that is marked slow, one that may start a server, another.
SLOW_SECONDS, LIVE_SECONDS, SECONDS = 10.0, 2.0, 0.05


def is_timing(item: pytest.Item) -> bool:
    return item.get_closest_marker("timing") is not None


def lane_of(item: pytest.Item) -> str:
    group = item.get_closest_marker("xdist_group")
    name = group.args[0] if group else item.nodeid.partition("::")[0]
    return f"{name} (timing)" if is_timing(item) else name


def seconds_of(item: pytest.Item) -> float:
    if item.get_closest_marker("slow"):
        return SLOW_SECONDS
    return LIVE_SECONDS if "live_server" in getattr(item, "fixturenames", ()) else SECONDS


def plan(items: list[pytest.Item]) -> dict[str, Any]:
    """The lane of each test, and the order of lanes: the longest first, so that all processes end
    at about the same time."""
    lanes = {item.nodeid: lane_of(item) for item in items}
    seconds: dict[str, float] = {}
    for item in items:
        lane = lanes[item.nodeid]
        seconds[lane] = seconds.get(lane, 0.0) + seconds_of(item)
    alone = {lanes[item.nodeid] for item in items if is_timing(item)}
    order = sorted(seconds, key=lambda lane: (-seconds[lane], lane))
    return {
        "lanes": lanes,
        "together": [lane for lane in order if lane not in alone],
        "alone": [lane for lane in order if lane in alone],
    }


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=is_timing)
    if hasattr(config.option, "reruns"):  # pytest-rerunfailures is installed
        for item in filter(is_timing, items):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS, reruns_delay=1))


# -- with xdist ------------------------------------------------------------------------------------
# Only the processes that run tests know their marks. They leave the plan in a file, because all
# that they send to the one that deals out the tests is names.


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Many tests wait, for a server or a client: with one process more, no core does.
    return max(1, min(cpus + 1, memory // WORKER_BYTES, MAX_WORKERS))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    folder = node.config._tmp_path_factory.getbasetemp()
    node.workerinput["plan"] = str(folder / "lanes.json")


@pytest.hookimpl(tryfirst=True)  # before the names are sent
def pytest_collection_finish(session: pytest.Session) -> None:
    workerinput = getattr(session.config, "workerinput", None)
    if workerinput is None:
        return
    path = Path(workerinput["plan"])
    mine = path.with_suffix("." + workerinput["workerid"])
    mine.write_text(json.dumps(plan(session.items)))
    mine.replace(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from lane_scheduling import LaneScheduling

    path = config._tmp_path_factory.getbasetemp() / "lanes.json"  # type: ignore[attr-defined]
    return LaneScheduling(config, log, lambda: json.loads(path.read_text()))
