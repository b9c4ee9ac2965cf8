"""``GET /steps``, a live stream of the engine's steps, and of snapshots for the dashboard."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.responses import Response

from octavo.server.api.server_context import ServerContext
from octavo.server.engine.generation import EngineState
from octavo.server.http.sse import EventStream, event
from octavo.server.watch.step_viewer import StepViewer

PATH = "/steps"


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    # Not in OpenAPI's document: tools that try its routes would wait for an end.
    @router.get(PATH, include_in_schema=False)
    async def steps(snapshots: bool = False, closely: bool = False) -> Response:
        viewer = _viewer(server, snapshots=snapshots or closely)  # closely is the older name
        for number, state in _states(server):
            viewer.put_state(state, "", number)
        return EventStream(_events(viewer), [viewer], server.settings, done=b"")

    return router


def _viewer(server: ServerContext, *, snapshots: bool) -> StepViewer:
    if snapshots:
        describe = list if server.replicas is None else server.replicas.describe
        return server.steps.add_snapshot_viewer(server.engine, server.model_names[0], describe)
    return server.steps.add_viewer()


def _states(server: ServerContext) -> list[tuple[int | None, EngineState]]:
    """Return the state of each replica by its number; of one engine, by None."""
    if server.replicas is None:
        return [(None, server.engine.state)]
    return [(replica.number, replica.state) for replica in server.replicas.replicas]


async def _events(viewer: StepViewer) -> AsyncGenerator[bytes, None]:
    async for each in viewer.events():
        yield event(each)
