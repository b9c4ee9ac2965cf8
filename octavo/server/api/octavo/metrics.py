"""``GET /metrics``, the server's metrics for Prometheus."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from octavo.server.api.server_context import ServerContext
from octavo.server.http.errors import HttpError
from octavo.server.watch.metrics import MEDIA_TYPES, NAMINGS


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        responses={
            200: {"content": {kind: {"schema": {"type": "string"}} for kind in MEDIA_TYPES}},
            400: {"description": "names has an unknown value."},
        },
    )
    async def metrics(
        names: Annotated[str, Query(json_schema_extra={"enum": [*NAMINGS]})] = "all",
        accept: Annotated[str, Header(include_in_schema=False)] = "",
    ) -> Response:
        if names not in NAMINGS:
            raise HttpError(400, f"names: must be one of {', '.join(NAMINGS)}", param="names")
        text, content_type = server.metrics.render(names, accept)
        return Response(text, headers={"content-type": content_type})

    return router
