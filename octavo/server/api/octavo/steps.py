"""``GET /steps``: what the engine does, as it does it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.responses import Response

from octavo.server.api.service import Service
from octavo.server.http.sse import EventStream, event
from octavo.server.watch.step_stream import Viewer

PATH = "/steps"


def create_router(service: Service) -> APIRouter:
    router = APIRouter()

    # Not in OpenAPI's document: those who try out what is there would wait for the end.
    @router.get(PATH, include_in_schema=False)
    async def steps(closely: bool = False) -> Response:
        viewer = _viewer(service, closely=closely)
        viewer.put_state(service.engine.state, "")
        return EventStream(_events(viewer), [viewer], service.settings, done=b"")

    return router


def _viewer(service: Service, *, closely: bool) -> Viewer:
    if closely:
        return service.steps.watch_closely(service.engine, service.model_names[0])
    return service.steps.watch()


async def _events(viewer: Viewer) -> AsyncGenerator[bytes, None]:
    async for each in viewer.events():
        yield event(each)
