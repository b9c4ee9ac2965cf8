"""``GET /steps``: what the engine does, as it does it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.responses import Response

from octavo.server.api.server_context import ServerContext
from octavo.server.http.sse import EventStream, event
from octavo.server.watch.step_viewer import StepViewer

PATH = "/steps"


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    # Not in OpenAPI's document: those who try out what is there would wait for the end.
    @router.get(PATH, include_in_schema=False)
    async def steps(closely: bool = False) -> Response:
        viewer = _viewer(server, closely=closely)
        viewer.put_state(server.engine.state, "")
        return EventStream(_events(viewer), [viewer], server.settings, done=b"")

    return router


def _viewer(server: ServerContext, *, closely: bool) -> StepViewer:
    if closely:
        return server.steps.add_snapshot_viewer(server.engine, server.model_names[0])
    return server.steps.add_viewer()


async def _events(viewer: StepViewer) -> AsyncGenerator[bytes, None]:
    async for each in viewer.events():
        yield event(each)
