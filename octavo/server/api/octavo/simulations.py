"""``POST /octavo/simulate``: what a server would make of a load, for the page's simulator.

It takes seconds of one processor, so a process of its own does it, one at a time: nothing that is
served waits for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from octavo.errors import DeadlineError, EngineError, QueueFullError
from octavo.server.api.fields import Body
from octavo.server.api.responses import describe
from octavo.server.api.service import Service
from octavo.server.http.body import JsonRoute
from octavo.server.http.errors import HttpError

MAX_SECONDS = 60.0
MAX_WAITING = 4  # requests, beside the one that is simulated
_MAX_CHARS = 200


class SimulationRequest(Body):
    """What serves. All else is the same for all: see octavo.page.serving_runs."""

    model: str = Field(max_length=_MAX_CHARS, description="a name of the catalogue")
    hardware: str = Field(max_length=_MAX_CHARS, description="a device by its name")
    dtype: str | None = Field(None, max_length=_MAX_CHARS)
    quantization: str | None = Field(None, max_length=_MAX_CHARS)
    kv_cache_dtype: str | None = Field(None, max_length=_MAX_CHARS)
    batching: Literal["continuous", "static"] = "continuous"
    prefix_caching: bool = True
    step_tokens: Literal[512, 2048, 8192] = 2048
    max_num_seqs: Literal[8, 32, 128] = 32
    replicas: Literal[1, 2, 4] = 1


class SimulationResponse(BaseModel):
    """Runs at several rates, as octavo.page.serving_runs tells them."""

    made: dict[str, str]
    settings: dict[str, Any]
    usual_rate: float
    runs: list[dict[str, Any]]


def create_router(service: Service) -> APIRouter:
    """``service`` is not needed: nothing is asked of its engine."""
    router = APIRouter(route_class=JsonRoute, tags=["planning"])
    simulator = Simulator()

    @router.post("/octavo/simulate", response_model=None, responses=describe(SimulationResponse))
    async def simulate(body: SimulationRequest) -> Response:
        """A load on a simulated server, at rates from little to too much."""
        text = await simulator.answer(body.model_dump_json())
        return Response(text, media_type="application/json")

    return router


class Simulator:
    """Runs of `octavo.page.serving_runs`, one after the other."""

    def __init__(self, max_seconds: float = MAX_SECONDS, max_waiting: int = MAX_WAITING):
        self._max_seconds = max_seconds
        self._max_waiting = max_waiting
        self._num_asked = 0
        self._turn = asyncio.Lock()

    async def answer(self, settings: str) -> bytes:
        """The runs that settings ask for, both as JSON.

        Raises:
            HttpError: 400, the settings make no sense.
            QueueFullError: too many are waiting already.
            DeadlineError: it takes longer than it should.
        """
        if self._num_asked > self._max_waiting:
            raise QueueFullError("too many simulations are waiting already", 5.0)
        self._num_asked += 1
        try:
            async with self._turn:
                text = await self._run(settings.encode())
        finally:
            self._num_asked -= 1
        if text.startswith(b'{"error"'):
            raise HttpError(400, json.loads(text)["error"])
        return text

    async def _run(self, settings: bytes) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo.page.serving_runs"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(self._max_seconds):
                text, _ = await process.communicate(settings)
        except TimeoutError:
            message = f"a simulation takes more than {self._max_seconds:g} s"
            raise DeadlineError(message) from None
        finally:
            if process.returncode is None:  # nobody waits any more, or too long
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise EngineError("the simulation failed: the server's log says why")
        return text
