"""Servers as people run them: a process of their own, a free port, real sockets; and clients that
are no more lenient than a socket."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 120.0  # for a server to load a model, on a machine that has much else to do
PATIENCE = 60.0  # for an answer; no test waits that long if all is well

COMPLETIONS = "/v1/completions"

T = TypeVar("T")


@dataclass
class Answer:
    """One HTTP answer. ``is_whole``: it came to its end, as its framing says."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool
    seconds: float = 0.0  # from sending the request to the end of the answer

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


@dataclass
class Stream:
    """One answer as events. ``events`` has those with JSON, in the order in which they came."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int
    headers: dict[str, str]
    events: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0
    is_whole: bool = False
    _pending: bytes = b""

    async def next(self) -> dict[str, Any] | None:
        """The next event with JSON; None at the end of the stream, however it ended."""
        while True:
            event, separator, rest = self._pending.partition(b"\n\n")
            if not separator:
                chunk = await self._next_chunk()
                if not chunk:
                    return None
                self._pending += chunk
                continue
            self._pending = rest
            if event == b"data: [DONE]":
                self.num_done += 1
            elif event.startswith(b"data: "):
                self.events.append(json.loads(event[6:]))
                return self.events[-1]

    async def rest(self) -> Stream:
        """Read to the end, and close."""
        while await self.next() is not None:
            pass
        await self.close()
        return self

    async def close(self) -> None:
        await _close(self.writer)

    async def _next_chunk(self) -> bytes:
        try:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            chunk = (await self.reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, OSError):
            return b""
        self.is_whole = size == 0
        return chunk

    # -- what came -----------------------------------------------------------------------------

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def token_ids(self) -> list[int]:
        """Of the first sample."""
        mine = [choice for choice in self.choices if choice["index"] == 0]
        return [token for choice in mine for token in choice.get("token_ids") or ()]

    @property
    def finish_reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"]]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]

    @property
    def usage(self) -> dict[str, Any]:
        return next(event["usage"] for event in reversed(self.events) if event.get("usage"))


ADMIN_KEY = "sk-admin-of-tests"
_OPERATORS = ("/load", "/metrics", "/slots", "/steps")  # what takes that key, where there are keys


class LiveServer:
    """``octavo serve`` in a process group of its own.

    Args:
        model, flags: its arguments.
        faults: misbehaviour of its engine, see octavo/executor/faulty.py.
        key: what the clients made here send.
        waits: for the server to be ready.
    """

    running: set[LiveServer] = set()

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        faults: dict[str, int] | None = None,
        key: str | None = None,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        waits: bool = True,
    ):
        ours = ("OCTAVO_API", "OCTAVO_ADMIN")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        environment |= {"PYTHONUNBUFFERED": "1", **(env or {})}
        if key is not None or any(flag.startswith("--api-key") for flag in flags):
            environment["OCTAVO_ADMIN_KEY"] = ADMIN_KEY
        self.has_faults = faults is not None
        if faults:
            environment["OCTAVO_FAULTS"] = json.dumps(faults)
        command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", "0", *flags]
        self.key = key
        self.log: list[str] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_ready = threading.Event()
        self.host, self.port = "127.0.0.1", 0
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*prefix, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        LiveServer.running.add(self)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if waits:
            self.wait_until_ready()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and all that it started, at once."""
        LiveServer.running.discard(self)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if found := re.search(r"(?:is ready on |\"url\": \")http://([0-9.]+):(\d+)", line):
                self.host, self.port = found[1], int(found[2])
                self.start_seconds = time.monotonic() - self.started
                self._is_ready.set()
        self._is_ready.set()  # it has ended

    def wait_until_ready(self) -> None:
        self._is_ready.wait(START_SECONDS)
        assert self.port, "\n".join(["the server did not start", *self.log])

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """Where the OpenAI API is."""
        return self.url + "/v1"

    def stop(self) -> None:
        """End it politely. Fails if it does not end well, or has met a bug of ours."""
        self.process.terminate()
        try:
            status = self.process.wait(30)
            assert status == 0, "\n".join([f"exit status {status}", *self.log[-20:]])
        finally:
            self.close()
        assert self.has_faults or not any("Traceback" in line for line in self.log), self.log

    # -- its processes -------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of the process that serves, also where it was started by another one."""
        tree = [self.process.pid, *self.descendants()]
        mine = f"{sys.executable}\0-m\0octavo\0serve\0".encode()
        return next(pid for pid in tree if command_line(pid).startswith(mine))

    def descendants(self) -> list[int]:
        """The processes that it has started, and those that these have."""
        return descendants(self.process.pid)

    def processes_of(self, module: str) -> list[int]:
        """Return those of its processes that run a module of Python."""
        return [pid for pid in self.descendants() if module.encode() in command_line(pid)]

    def engine_pids(self) -> list[int]:
        return self.processes_of("octavo.server.engine.worker")

    @property
    def engine_pid(self) -> int:
        (pid,) = self.engine_pids()
        return pid

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self, timeout: float) -> int:
        """Its exit status."""
        return self.process.wait(timeout)

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    # -- clients -------------------------------------------------------------------------------

    def request(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """An HTTP request as bytes. ``body``: bytes, or what becomes JSON."""
        content = body if isinstance(body, bytes) else b""
        if body is not None and not isinstance(body, bytes):
            content = json.dumps(body).encode()
        fields = {"Host": f"{self.host}:{self.port}", "Connection": "close"}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        if self.key is not None:
            key = ADMIN_KEY if path.startswith(_OPERATORS) else self.key
            fields["Authorization"] = f"Bearer {key}"
        fields |= headers or {}
        method = method or ("GET" if body is None else "POST")
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), PATIENCE)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Clients at work, on an event loop; their connections are closed at the end."""

        async def run() -> T:
            try:
                return await work
            finally:
                writers, self._writers = self._writers, set()
                for writer in writers:
                    await _close(writer)

        return asyncio.run(run())

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that ends with `run`."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        self._writers.add(writer)
        return reader, writer

    def fetch(self, path: str, body: Any = None, **options: Any) -> Answer:
        """Send a request and wait for its answer."""
        return asyncio.run(self.ask(path, body, **options))

    async def ask(self, path: str, body: Any = None, **options: Any) -> Answer:
        started = time.perf_counter()
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(self.request(path, body, **options))
                answer = parse_answer(await reader.read())
            finally:
                await _close(writer)
        answer.seconds = time.perf_counter() - started
        return answer

    async def stream(self, body: Any, path: str = COMPLETIONS, **options: Any) -> Stream:
        """Send a request for a stream, and wait for the header of its answer."""
        async with asyncio.timeout(PATIENCE):
            reader, writer = await self.open()
            writer.write(self.request(path, body, **options))
            status, headers = parse_header(await reader.readuntil(b"\r\n\r\n"))
        return Stream(reader, writer, status, headers)

    async def complete(self, body: Any, **options: Any) -> Stream:
        """A whole stream."""
        async with asyncio.timeout(PATIENCE):
            return await (await self.stream(body, **options)).rest()

    # -- what it says of itself ----------------------------------------------------------------

    def load(self) -> dict[str, Any]:
        """Also where an event loop runs."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", "/load", headers=headers)
            return json.loads(connection.getresponse().read())

    def counter(self, name: str, **labels: str) -> float:
        """The sum of all series of a metric (``octavo_`` need not be said) with these labels."""
        return self.counters().sum(name, **labels)

    def counters(self) -> Counters:
        return Counters(self.fetch("/metrics?names=plain").body.decode())

    def wait_for_load(self, is_met: Callable[[dict[str, Any]], bool], seconds: float = 20.0) -> Any:
        """The engine's load when it is such; fails if that does not come in time."""
        deadline = time.monotonic() + seconds
        while not is_met(load := self.load()):
            assert time.monotonic() < deadline, load
            time.sleep(0.01)
        return load

    def wait_until_idle(self) -> dict[str, Any]:
        """The load when nothing runs, waits or holds blocks."""
        names = ("num_running", "num_waiting", "num_used_blocks")
        return self.wait_for_load(lambda load: not any(load[name] for name in names))


class Counters:
    """The metrics of one moment."""

    def __init__(self, text: str):
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def sum(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"octavo_{name}" and labels.items() <= sample.labels.items()
        )


def parse_header(data: bytes) -> tuple[int, dict[str, str]]:
    lines = data.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(lines[0].split()[1]), headers


def parse_answer(data: bytes) -> Answer:
    """An answer of which nothing more will come."""
    header, separator, content = data.partition(b"\r\n\r\n")
    if not separator:
        return Answer(0, {}, data, False)
    status, headers = parse_header(header)
    if headers.get("transfer-encoding") == "chunked":
        body, is_whole = _unchunked(content)
        return Answer(status, headers, body, is_whole)
    return Answer(status, headers, content, len(content) == int(headers.get("content-length", 0)))


def _unchunked(data: bytes) -> tuple[bytes, bool]:
    pieces = []
    while True:
        line, separator, rest = data.partition(b"\r\n")
        if not separator:
            return b"".join(pieces), False
        size = int(line, 16)
        if size == 0:
            return b"".join(pieces), rest == b"\r\n"
        pieces.append(rest[:size])
        data = rest[size + 2 :]


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may have ended
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(process))
    found = [*children.get(pid, ())]
    for process in found:
        found += children.get(process, ())
    return found
