"""``GET /octavo/tensors`` and ``/octavo/tensors/{name}``, the weights of the served model.

The page's picture of quantization shows them. They are read from the model's files, not from the
engine, which may have packed them; and by a process of their own (octavo.page.tensors), a few
thousand numbers at a time.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.bounded_subprocess import BoundedSubprocess
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError
from octavo.server.http.sse import run_until_disconnect

MAX_SECONDS = 30.0

_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
Share = Annotated[
    str, Query(description="from 0, the first, to 1, the last", json_schema_extra=_SHARE)
]


class TensorEntry(BaseModel):
    name: str
    shape: list[int] | None = Field(description="null where several tensors of the file make it up")
    format: str | None
    bytes: int = Field(description="in the file")


class TensorsResponse(BaseModel):
    """The first weights of the model's files, in their order."""

    tensors: list[TensorEntry]
    num_left_out: int


class TensorResponse(BaseModel):
    """A part of one tensor: ``float32`` in base64, little-endian, row by row."""

    name: str
    shape: list[int]
    format: str
    is_quantized: bool = Field(description="so they have been rounded before")
    row: int
    column: int
    rows: int
    columns: int
    float32: str


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(tags=["planning"])
    reader = BoundedSubprocess("octavo.page.tensors", "reading weights", MAX_SECONDS)
    table: list[bytes] = []  # the first answer, kept: the served model does not change

    async def ask(request: Request, **question: Any) -> bytes:
        if server.model_path is None:
            raise HttpError(404, "the model's files are not known")
        tenant = request_context(request).tenant.name
        asking = reader.answer({"path": str(server.model_path), **question}, tenant)
        return await run_until_disconnect(request, asking)

    @router.get("/octavo/tensors", response_model=None, responses=describe(TensorsResponse))
    async def tensors(request: Request) -> Response:
        """Return the names, shapes and formats of the weights."""
        if not table:
            table.append(await ask(request))
        return Response(table[0], media_type="application/json")

    @router.get(
        "/octavo/tensors/{name:path}", response_model=None, responses=describe(TensorResponse)
    )
    async def tensor(
        request: Request, name: str, down: Share = "0", across: Share = "0"
    ) -> Response:
        """Return some weights of one tensor, as floats."""
        place = {"down": _share(down, "down"), "across": _share(across, "across")}
        text = await ask(request, name=name, **place)
        return Response(text, media_type="application/json")

    return router


def _share(text: str, name: str) -> float:
    """Return a number from 0 to 1; raise HttpError, 400, for others."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise HttpError(400, f"{name}: must be a number from 0 to 1, not {text!r:.40}", param=name)
    return share
