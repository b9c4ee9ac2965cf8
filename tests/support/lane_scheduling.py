"""Deals out lanes of tests to processes; the last of these runs those that must be alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdist.scheduler import LoadScopeScheduling


class LaneScheduling(LoadScopeScheduling):
    """xdist's scheduling by scope, where scopes are lanes; see lanes.py.

    A process holds a test back until it knows the next one, because fixtures that both need are
    kept. So each is given more before it is through, or told that nothing comes.
    """

    def __init__(self, config: Any, log: Any, read_plan: Callable[[], dict[str, Any]]):
        super().__init__(config, log)
        self._read_plan = read_plan
        self._plan: dict[str, Any] = {}
        self._alone: dict[str, dict[str, bool]] = {}

    def schedule(self) -> None:
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = list(next(iter(self.registered_collections.values())))
            self._plan = self._read_plan()
            lanes: dict[str, dict[str, bool]] = {}
            for test in self.collection:
                lanes.setdefault(self._split_scope(test), {})[test] = False
            self.workqueue.update((lane, lanes[lane]) for lane in self._plan["together"])
            self._alone = {lane: lanes[lane] for lane in self._plan["alone"]}
        for node in self.nodes:
            self._reschedule(node)
        for node in self.nodes:  # what it begins with may be a single test
            self._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return self._plan["lanes"][nodeid]

    @property
    def tests_finished(self) -> bool:
        return not self._alone and super().tests_finished

    @property
    def has_pending(self) -> bool:
        return bool(self._alone) or super().has_pending

    def remove_node(self, node: Any) -> str | None:
        """One has ended. If that was a crash: in which test, which is not run again."""
        lanes = self.assigned_work.pop(node)
        crashed = next(
            (test for tests in lanes.values() for test, is_done in tests.items() if not is_done),
            None,
        )
        if crashed is not None:
            lanes[self._split_scope(crashed)][crashed] = True
        left = {lane: tests for lane, tests in lanes.items() if not all(tests.values())}
        self.workqueue.update(left)
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        if not self.workqueue and self._alone and not node.shutting_down:
            if len(self.nodes) == 1:
                self.workqueue.update(self._alone)
                self._alone = {}
            elif node is self.nodes[0]:
                return  # it waits for the others to end
        super()._reschedule(node)
