"""A deployment for those who run Ray Serve already: each of its replicas is one octavo server.

    serve run octavo.cluster.ray_serve:app model=smollm2-135m num_cpus=4

Serve's proxy, its autoscaling and its health checks stand in front; each request passes through
Serve and through this file. `octavo serve --distributed ray` has neither in its way, knows what is
cached where, and goes on with the streams of an engine that died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from octavo.base.errors import ConfigError, EngineError

_log = logging.getLogger("ray.serve")

# Headers of one connection, not of an answer.
_OF_CONNECTION = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})
_SETTINGS = ("model", "flags", "num_cpus", "num_gpus", "num_replicas", "autoscaling_config")


class ServerProcess:
    """``octavo serve`` on loopback, as a child that ends with this process."""

    def __init__(self, model: str, flags: list[str]):
        self._words = ["serve", model, "--port", "0", "--log-format", "json", *flags]
        self.url: Future[str] = Future()  # once it serves; EngineError if it ends before
        threading.Thread(target=self._run, name="octavo-serve", daemon=True).start()

    def _run(self) -> None:
        """Start it, and read its log: as long as this thread lives, so may the child."""
        with subprocess.Popen(
            [sys.executable, "-m", "octavo.cluster.tied_command", *self._words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            last = "it said nothing"
            for line in process.stderr or ():
                last = line.strip()
                _log.info("%s", last)
                if not self.url.done() and (url := _url_in(last)):
                    self.url.set_result(url)
            status = process.wait()
        if not self.url.done():
            self.url.set_exception(EngineError(f"octavo serve ended with {status}: {last}"))


class OctavoReplica:
    """A replica of the deployment: passes requests on to a server of its own.

    Args:
        model, flags: of ``octavo serve``.
    """

    def __init__(self, model: str, flags: list[str]):
        self._server = ServerProcess(model, flags)
        self._session: Any = None

    async def __call__(self, request: Any) -> Any:
        """Return the server's answer, as it comes."""
        from starlette.responses import StreamingResponse

        answer = await self._ask(
            request.method,
            request.url.path + (f"?{request.url.query}" if request.url.query else ""),
            headers=_without(request.headers, "host"),
            data=await request.body(),
        )
        return StreamingResponse(
            _pieces(answer), status_code=answer.status, headers=_without(answer.headers)
        )

    async def check_health(self) -> None:
        """Raise EngineError if the server is not healthy; Serve calls this."""
        async with await self._ask("GET", "/health") as answer:
            if answer.status != 200:
                raise EngineError(f"the server's health is {answer.status}")

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        import aiohttp  # of ray[serve]

        url = await asyncio.wrap_future(self._server.url)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
            )
        return await self._session.request(method, url + path, **options)


def app(settings: dict[str, Any]) -> Any:
    """Return the application for Serve.

    Args:
        settings: ``model``; ``flags`` of ``octavo serve``, a list or a text with spaces;
            ``num_cpus`` (1) and ``num_gpus`` (0) of each replica; ``num_replicas`` (1), or Serve's
            ``autoscaling_config``.

    Raises:
        ConfigError: there are others.
    """
    if unknown := sorted(settings.keys() - set(_SETTINGS)):
        raise ConfigError(f"{', '.join(unknown)}: settings are {', '.join(_SETTINGS)}")
    from ray import serve

    flags = settings.get("flags", [])
    options: dict[str, Any] = {
        "ray_actor_options": {
            "num_cpus": float(settings.get("num_cpus", 1)),
            "num_gpus": float(settings.get("num_gpus", 0)),
        }
    }
    if "autoscaling_config" in settings:
        if "num_replicas" in settings:
            raise ConfigError("give num_replicas or autoscaling_config, not both")
        options["autoscaling_config"] = settings["autoscaling_config"]
    else:
        options["num_replicas"] = int(settings.get("num_replicas", 1))
    deployment: Any = serve.deployment(OctavoReplica, name="octavo", **options)
    words = flags.split() if isinstance(flags, str) else list(flags)
    return deployment.bind(settings.get("model", "smollm2-135m"), words)


async def _pieces(answer: Any) -> AsyncIterator[bytes]:
    """Yield the body of an answer; the server hears of it when the client has gone."""
    async with answer:
        async for piece in answer.content.iter_any():
            yield piece


def _without(headers: Any, *others: str) -> dict[str, str]:
    left_out = _OF_CONNECTION.union(others)
    return {name: value for name, value in headers.items() if name.lower() not in left_out}


def _url_in(line: str) -> str | None:
    """Return the address that a line of a server's log says it is ready at."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    url = found.get("url") if isinstance(found, dict) else None
    return str(url) if url else None
