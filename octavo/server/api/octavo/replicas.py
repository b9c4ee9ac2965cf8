"""``/octavo/replicas``: the replicas of the engine, which an operator may add, drain and remove."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from octavo.base.errors import ConfigError
from octavo.server.api.fields import MAX_INT, Body
from octavo.server.api.responses import describe
from octavo.server.engine.replicas import ReplicaSet
from octavo.server.http.body import JsonRoute
from octavo.server.http.errors import HttpError
from octavo.server.http.json_text import encode


class ReplicaState(BaseModel):
    """One replica. ``requests`` are those that were sent there and are not over; the others are
    figures of its last step."""

    replica: int = Field(description="its number, which is never used again")
    state: str = Field(description="starting, ready, draining, restarting or failed")
    role: Literal["prefill", "decode"] | None = Field(
        None, description="with prefill_replicas: whether it computes prompts, or answers"
    )
    requests: int
    num_running: int
    num_waiting: int
    kv_usage: float
    num_restarts: int


class ReplicasResponse(BaseModel):
    replicas: list[ReplicaState]


class ReplicasRequest(Body):
    """A change of the replicas that an operator asks for."""

    action: Literal["add", "drain", "remove"] = Field(
        description="add: start one more. drain: send no more requests to one, and end it when its "
        "last is over. remove: end it now; requests that it has not begun go to others."
    )
    replica: int | None = Field(
        None, ge=0, le=MAX_INT, description="the number of the one to drain or remove"
    )


def create_router(replicas: ReplicaSet) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["operation"])

    def answer(status: int = 200) -> Response:
        text = encode({"replicas": replicas.describe()})
        return Response(text, status, media_type="application/json")

    @router.get("/octavo/replicas", response_model=None, responses=describe(ReplicasResponse))
    async def show() -> Response:
        """Return the replicas: state, load and restarts of each."""
        return answer()

    @router.post("/octavo/replicas", response_model=None, responses=describe(ReplicasResponse))
    async def change(body: ReplicasRequest) -> Response:
        """Add a replica, drain one, or remove one; returns the replicas, before that is done."""
        try:
            if body.action == "add":
                if body.replica is not None:
                    raise HttpError(400, "replica: a new one gets a new number", param="replica")
                replicas.add()
            else:
                _carry_out(replicas, body.action, body.replica)
        except ConfigError as error:
            raise HttpError(409, str(error)) from None
        return answer(202)

    return router


def _carry_out(replicas: ReplicaSet, action: str, number: int | None) -> None:
    known: dict[str, Any] = {"drain": replicas.drain, "remove": replicas.remove}
    if number is None:
        raise HttpError(400, f"replica: {action} needs the number of one", param="replica")
    try:
        known[action](number)
    except KeyError:
        raise HttpError(404, f"There is no replica {number}.", param="replica") from None
