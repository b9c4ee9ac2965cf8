"""`StepStream`, which passes the engine's steps on to the clients of ``GET /steps``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.core.stats import StepStats
from octavo.server.engine.generation import EngineClient, EngineObserver, EngineState, Generation
from octavo.server.watch.step_viewer import StepViewer

if TYPE_CHECKING:
    from octavo.server.watch.snapshot_viewer import SnapshotViewer


class StepStream(EngineObserver):
    """Passes steps on to viewers. Without viewers it does nothing."""

    def __init__(self) -> None:
        self._viewers: set[StepViewer] = set()
        self._snapshot_viewers: set[SnapshotViewer] = set()  # these are in _viewers, too

    def add_viewer(self) -> StepViewer:
        """Return a viewer of all steps, until it is closed."""
        viewer = StepViewer(self._viewers.discard)
        self._viewers.add(viewer)
        return viewer

    def add_snapshot_viewer(
        self,
        engine: EngineClient,
        model: str,
        replicas: Callable[[], list[dict[str, Any]]] = list,
    ) -> SnapshotViewer:
        """Return a viewer that also gets snapshots, which the engine sends until it is closed.

        ``replicas`` describes the replicas, where there are several.
        """
        from octavo.server.watch.snapshot_viewer import SnapshotViewer, about_engine

        def on_close(viewer: StepViewer) -> None:
            self._viewers.discard(viewer)
            self._snapshot_viewers.discard(viewer)
            if not self._snapshot_viewers:
                engine.enable_snapshots(False)

        viewer = SnapshotViewer(on_close, lambda: about_engine(engine, model), replicas)
        self._viewers.add(viewer)
        self._snapshot_viewers.add(viewer)
        engine.enable_snapshots(True)  # again for each: it sends a snapshot at once
        return viewer

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def end(self) -> None:
        """End all streams after what is pending: there will be no more steps."""
        for viewer in self._viewers:
            viewer.end()

    def on_step(self, stats: StepStats, replica: int | None = None) -> None:
        for viewer in self._viewers:
            viewer.put(stats, replica)

    def on_snapshot(
        self, step_id: int, snapshot: dict[str, Any], replica: int | None = None
    ) -> None:
        for viewer in self._snapshot_viewers:
            viewer.put_snapshot(step_id, snapshot, replica)

    def on_tokens(self, generation: Generation, num_tokens: int, gap: float | None) -> None:
        for viewer in self._snapshot_viewers:
            if gap is not None:
                viewer.put_gap(gap)
            elif generation.stats.num_output_tokens == 0:
                viewer.put_first_token(generation)

    def on_finished(self, generation: Generation, reason: str) -> None:
        for viewer in self._snapshot_viewers:
            viewer.put_end(generation, reason)

    def on_rejected(self, reason: str) -> None:
        for viewer in self._snapshot_viewers:
            viewer.put_rejection(reason)

    def on_engine_state(self, state: EngineState, detail: str, replica: int | None = None) -> None:
        for viewer in self._viewers:
            viewer.put_state(state, detail, replica)

    def on_removed(self, replica: int) -> None:
        for viewer in self._viewers:
            viewer.put_removal(replica)
