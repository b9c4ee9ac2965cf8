"""A browser without a screen, and a server whose answers a test can foresee."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.base.errors import OctavoError
from octavo.models.checkpoint import Checkpoint
from octavo.page.serving_runs import CHOICES, RECORDED
from octavo.page.tensors import tensor_slice, tensor_table
from octavo.server.api.octavo import deployment, specs
from octavo.server.http.context import RequestContext
from octavo.server.http.errors import HttpError, error_response, to_http_error
from octavo.server.http.tenants import Tenant
from octavo.server.page import routes as page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",  # which root needs; nothing but our own page is opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    # Nobody else is spoken to.
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
]
# Runs the browser with the ends of two pipes as its files 3 and 4, where it expects them.
LAUNCH = (
    "import os, sys; a, b = map(int, sys.argv[1:3]);"
    "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 40.0  # seconds, on a busy machine, for what takes milliseconds
AXE = Path(os.environ.get("OCTAVO_AXE", "node_modules/axe-core/axe.min.js"))  # npm install axe-core

# Elements inside this one that stick out of the window on either side.
OVERFLOWING = """[...document.querySelectorAll(`${%s} *`)].filter((element) => {
    const box = element.getBoundingClientRect();
    return element.checkVisibility() && !element.closest(`.unseen, .bar-buttons span, pre, svg,
            .contents, .table-box, .number-table, .chart-scroll`)
        && box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map((element) => element.outerHTML.slice(0, 80))"""
# Text of charts that their drawing cuts off, or that stands beside it.
CUT_OFF = """[...document.querySelectorAll(".chart-svg text")].filter((text) => {
    const [box, drawing] = [text, text.ownerSVGElement].map((one) => one.getBoundingClientRect());
    return text.checkVisibility() && (box.left < drawing.left - 4 || box.right > drawing.right + 4
        || box.top < drawing.top - 4 || box.bottom > drawing.bottom + 4);
}).map((text) => `${text.textContent} is cut off`)"""
# The contrast of each visible piece of text with what is behind it, where it is below 4.5.
FAINT = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const painted = (layers) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const [css, opacity] of layers) {
            canvas.globalAlpha = opacity;
            canvas.fillStyle = css;
            canvas.fillRect(0, 0, 1, 1);
        }
        return canvas.getImageData(0, 0, 1, 1).data;
    };
    const light = (layers) => {
        const [r, g, b] = [...painted(layers)].map((v) => v / 255).map(
            (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
        const own = [getComputedStyle(element).backgroundColor, 1];
        const below = painted([own])[3] === 255 ? [] : behind(element.parentElement);
        const block = element.matches(".block-text") && getComputedStyle(element.previousSibling);
        return [...below, own, ...(block ? [[block.fill, Number(block.opacity)]] : [])];
    };
    const faint = [];
    for (const element of document.querySelectorAll("body *")) {
        const hasText = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!hasText || !element.checkVisibility() || element.closest(":disabled")) continue;
        const { color, fill } = getComputedStyle(element);
        const ink = [element.closest("svg") ? fill : color, 1];
        const [a, b] = [light([ink]), light(behind(element))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) faint.push([element.outerHTML.slice(0, 80), contrast]);
    }
    return faint;
})()"""
# Where the focus is, and whether that can be seen.
FOCUS = """(() => {
    const element = document.activeElement;
    const { left, right, top } = element.getBoundingClientRect();
    const isSeen = [element, element.parentElement].some((one) => {
        const { outlineStyle, outlineWidth } = getComputedStyle(one);
        return outlineStyle !== "none" && outlineWidth !== "0px";
    });
    const name = element === document.body ? "" : element.outerHTML.slice(0, 80);
    return [name, left, right, top + scrollY, isSeen];
})()"""


# -- the browser -----------------------------------------------------------------------------


class CommandError(AssertionError):
    """Chromium could not do what it was asked for."""

    # Of a document that has just made room for the next one.
    LEAVING = ("navigated or closed", "context was destroyed", "Cannot find context")

    def __init__(self, method: str, message: str):
        super().__init__(f"{method}: {message}")
        self.was_leaving = any(words in message for words in self.LEAVING)


class Browser:
    """Chromium, spoken to in its DevTools protocol: JSON ended by a NUL, over two pipes."""

    def __init__(self, profile: Path):
        theirs_in, self._write = _high(os.pipe())
        self._read, theirs_out = _high(os.pipe())
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out)]
            + [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; what happens meanwhile is added to ``events``."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(until - time.monotonic())
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise CommandError(method, answer["error"]["message"])
                return answer["result"]

    def _receive(self, timeout: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, timeout))
            assert ready, "Chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(line)
        if "id" not in message:
            self.events.append(message)
        return message

    def close(self) -> None:
        try:
            self.call("Browser.close")
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._read)
            os.close(self._write)


class Page:
    """One tab, with storage of its own."""

    def __init__(self, browser: Browser, address: str):
        self._browser = browser
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call(
            "Target.createTarget", url="about:blank", browserContextId=self.context
        )["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.address = address
        self.show(1100, 800)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def show(
        self,
        width: int,
        height: int,
        *,
        dark: bool = False,
        touch: bool = False,
        calm: bool = False,
    ) -> None:
        """Be a screen of this size; ``calm``: of somebody who does not like what moves."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=touch,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        wishes = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if calm else "no-preference",
        }
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: str = "") -> None:
        self.call("Page.navigate", url=self.address + path)
        self.wait_for("document.readyState === 'complete' && location.pathname !== 'blank'")

    def js(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout: float = PATIENCE) -> Any:
        """The value of an expression as soon as it is truthy, in this document or in the next."""
        until = time.monotonic() + timeout
        while not (value := self._js_unless_leaving(expression)):
            assert time.monotonic() < until, f"still not true: {expression}\n{self.text('body')}"
            time.sleep(0.01)
        return value

    def _js_unless_leaving(self, expression: str) -> Any:
        try:
            return self.js(expression)
        except CommandError as error:
            if not error.was_leaving:
                raise
            return None

    def text(self, selector: str) -> str:
        """What the last such element shows; "" without one."""
        last = f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)"
        return str(self.js(f"{last}?.innerText ?? ''"))

    def wait_for_text(self, selector: str, part: str) -> None:
        last = f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)"
        self.wait_for(f"{last}?.innerText.includes({json.dumps(part)})")

    def click(self, selector: str, label: str | None = None) -> None:
        """Click, with the mouse, on the last visible such element (with this text)."""
        found = self.wait_for(f"""(() => {{
            const all = [...document.querySelectorAll({json.dumps(selector)})].filter((element) =>
                element.checkVisibility() && !element.disabled
                && ({json.dumps(label)} ?? element.innerText) === element.innerText);
            if (all.length === 0) return null;
            all.at(-1).scrollIntoView({{block: "nearest"}});
            const box = all.at(-1).getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=found[0], y=found[1], button="left", clickCount=1,
            )  # fmt: skip

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "ArrowRight": 39}[key]
        params = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **params, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def send(self, text: str) -> None:
        self.click("#message")
        self.write(text)
        self.press("Enter")

    def overflowing(self, selector: str = "body") -> list[str]:
        """Elements inside of this one that stick out of the window."""
        return self.js(OVERFLOWING % json.dumps(selector))

    def faint(self) -> list[tuple[str, float]]:
        """Visible text whose contrast with what is behind it is below 4.5."""
        return self.js(FAINT)

    def barriers(self) -> list[Any]:
        """What keeps somebody out, on a phone, a tablet and a desk, by day and by night: text that
        is faint or sticks out, what moves by itself, and what axe finds serious, where it is."""
        found: list[Any] = []
        for width, dark in ((360, False), (768, True), (1440, False)):
            self.show(width, 900, dark=dark, calm=True)
            found += [(width, each) for each in (*self.overflowing(), *self.faint())]
            self.js("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
            found += [(width, each) for each in self.js(CUT_OFF)]  # charts follow the width
            found += self.js("document.getAnimations().map((each) => String(each))")
            if self.js("document.documentElement.scrollWidth") > width:
                found.append((width, "scrolls sideways"))
            if AXE.is_file() and width < 1440:
                found += [(width, each) for each in self.serious_findings()]
        return found

    def serious_findings(self) -> list[tuple[str, str]]:
        """Of axe-core: the rule, and the first element that breaks it."""
        if not self.js("'axe' in globalThis"):
            self.js(f"{AXE.read_text()}; 0")
        found = self.js("axe.run().then(({violations}) => JSON.stringify(violations))")
        return [
            (finding["id"], finding["nodes"][0]["html"][:120])
            for finding in json.loads(found)
            if finding["impact"] in ("serious", "critical")
        ]

    def lost_steps(self, most: int = 60) -> list[tuple[str, str]]:
        """Pairs of elements between which Tab goes neither on nor down, or whose focus is not seen,
        until it leaves the page."""
        lost, before = [], ["", 0.0, 0.0, -1e9, True]
        for _ in range(most):
            self.press("Tab")
            name, left, right, top, is_seen = here = self.js(FOCUS)
            if not name:
                break
            if not is_seen or (top < before[3] - 8 and left < before[2] - 1):
                lost.append((before[0], name))
            before = here
        return lost

    def take_screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def take_complaints(self) -> list[str]:
        """Exceptions, console errors, refusals by the policy and requests to other places, since
        the last call."""
        self.js("0")  # what has happened has been told before this is answered
        found = []
        told, self._browser.events = self._browser.events, []
        events = []
        for event in told:
            is_ours = event.get("sessionId") == self._session
            (events if is_ours else self._browser.events).append(event)
        for event in events:
            params = event["params"]
            if event["method"] == "Network.requestWillBeSent":
                if not params["request"]["url"].startswith((self.address, "data:")):
                    found.append(params["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["source"] != "network":
                found.append(params["entry"]["text"])
        return found


def _high(pair: tuple[int, int]) -> tuple[int, int]:
    """The same pipe by numbers that do not clash with 3 and 4."""
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in pair]
    for one in pair:
        os.close(one)
    return moved[0], moved[1]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


# -- the server ------------------------------------------------------------------------------


class Chats:
    """An API whose answer depends on the last message: "count 5" streams five words, anything
    that a test has put into ``answers`` gets what stands there, in one piece for each string, or
    for each delta.

    ``requests`` are the bodies that came, ``keys`` their Authorization headers; ``left`` counts
    the streams that the client left before their end.
    """

    def __init__(self) -> None:
        facts = {"max_model_len": 8192, "sampling_defaults": {"temperature": 0.6}}
        self.models = [{"id": "octavo-test", "object": "model", **facts}]
        self.answers: dict[str, list[str | dict[str, Any]]] = {}
        self.otherwise: list[str | dict[str, Any]] | None = None  # to any other message
        self.refusals: dict[str, tuple[int, dict[str, Any], dict[str, str]]] = {}
        self.api_key: str | None = None
        self.delay = 0.0
        self.end: dict[str, Any] = {"finish_reason": "stop"}  # how the last choice says so
        self.timings: dict[str, Any] = {"predicted_per_second": 43.21}
        self.requests: list[dict[str, Any]] = []
        self.left = 0

    async def list_models(self, request: Request) -> JSONResponse:
        if not self._is_allowed(request):
            return _refuse_key()
        return JSONResponse({"object": "list", "data": self.models})

    async def chat(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return _refuse_key()
        body = await request.json()
        self.requests.append(body)
        message = body["messages"][-1]["content"]
        if message in self.refusals:
            status, error, headers = self.refusals[message]
            return JSONResponse({"error": error}, status, headers)
        headers = {"x-request-id": "req-42"}
        return StreamingResponse(
            self._stream(message, body), media_type="text/event-stream", headers=headers
        )

    async def _stream(self, message: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        pieces = self.answers.get(message, self.otherwise)
        if pieces is None:
            assert message.split()[0] == "count"
            pieces = [f"{n} " for n in range(1, int(message.split()[1]) + 1)]
        is_over = False
        try:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            for piece in pieces:
                if piece == "CUT":
                    is_over = True
                    return
                if piece == "ERROR":
                    is_over = True
                    yield _event({"error": {"message": "the engine was restarted", "code": None}})
                    return
                await asyncio.sleep(self.delay)
                delta = piece if isinstance(piece, dict) else {"content": piece}
                logprobs = _logprobs(str(piece)) if body.get("logprobs") else None
                yield _event({"choices": [{"index": 0, "delta": delta, "logprobs": logprobs}]})
            calls = any("tool_calls" in piece for piece in pieces if isinstance(piece, dict))
            end = {"finish_reason": "tool_calls"} if calls else self.end
            yield _event({"choices": [{"index": 0, "delta": {}, **end}]})
            usage = {
                "prompt_tokens": 1234,
                "completion_tokens": len(pieces),
                "total_tokens": 1234 + len(pieces),
                "prompt_tokens_details": {"cached_tokens": 1200},
            }
            yield _event({"choices": [], "usage": usage, "timings": self.timings})
            is_over = True
            yield b"data: [DONE]\n\n"
        finally:
            self.left += not is_over

    def _is_allowed(self, request: Request) -> bool:
        given = request.headers.get("authorization")
        return self.api_key is None or given == f"Bearer {self.api_key}"


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _logprobs(piece: str) -> dict[str, Any]:
    """Of a piece that was one token: 80 % likely, beside one other."""
    chosen, other = {"token": piece, "logprob": -0.2231}, {"token": "other", "logprob": -1.8971}
    return {"content": [{**chosen, "top_logprobs": [chosen, other]}]}


def _refuse_key() -> JSONResponse:
    return JSONResponse(
        {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}, 401
    )


class Steps:
    """What ``/steps`` answers: the ``events``, and then those that a test adds, until it is cut;
    or, where there is one, what an ``endless`` generator has."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.endless: Callable[[], AsyncIterator[dict[str, Any]]] | None = None
        self.api_key: str | None = None
        self.num_viewers = self.num_cuts = 0

    async def answer(self, request: Request) -> Response:
        given = request.headers.get("authorization")
        if self.api_key is not None and given != f"Bearer {self.api_key}":
            return _refuse_key()
        self.num_viewers += 1
        stream = self._stream() if self.endless is None else self._stream_endlessly(self.endless())
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream_endlessly(
        self, events: AsyncIterator[dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        num_cuts = self.num_cuts
        async for each in events:
            if num_cuts != self.num_cuts:
                return
            yield _event(each)

    async def _stream(self) -> AsyncIterator[bytes]:
        num_cuts, at = self.num_cuts, 0
        while num_cuts == self.num_cuts:
            for each in self.events[at:]:
                yield _event(each)
            at = len(self.events)
            await asyncio.sleep(0.02)


def _with_context(app: ASGIApp) -> ASGIApp:
    """The app with the context that a server's gate gives each request."""

    async def with_context(scope: Scope, receive: Receive, send: Send) -> None:
        scope["octavo"] = RequestContext("req-1", Tenant("test"), time.monotonic())
        await app(scope, receive, send)

    return with_context


class Site:
    """The page and its API on a port of this machine; ``chats`` may change at any time."""

    def __init__(self) -> None:
        self.chats, self.steps = Chats(), Steps()
        self.deployment: dict[str, Any] | None = None  # what "this server" is in pictures
        self.checkpoint: Checkpoint | None = None  # whose weights it has
        self.simulated: list[dict[str, Any]] = []  # settings that were asked for
        # Without one of these, what it is about is not answered yet.
        self.simulating, self.deployed = threading.Event(), threading.Event()
        self.simulating.set()
        self.deployed.set()
        app = FastAPI(openapi_url=None)
        app.include_router(page.create_router(None))  # type: ignore[arg-type]
        app.add_route("/v1/models", self._list_models, ["GET"])
        app.add_route("/steps", self._steps, ["GET"])
        app.add_route("/octavo/deployment", self._deployment, ["GET"])
        # Of what is served, a test sets the folder; configs are read in processes of their own.
        self.served = SimpleNamespace(model_path=None, model_names=("tiny",), engine=None)
        app.include_router(deployment.create_router(self.served))  # type: ignore[arg-type]
        app.include_router(specs.create_router(self.served))  # type: ignore[arg-type]
        for kind in (HttpError, OctavoError):
            app.add_exception_handler(kind, lambda _, error: error_response(to_http_error(error)))
        app.add_route("/octavo/tensors", self._tensors, ["GET"])
        app.add_route("/octavo/tensors/{name:path}", self._tensor, ["GET"])
        app.add_route("/v1/chat/completions", self._chat, ["POST"])
        app.add_route("/octavo/simulate", self._simulate, ["POST"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self._server = uvicorn.Server(
            uvicorn.Config(_with_context(app), log_level="error", ws="none", lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    async def _list_models(self, request: Request) -> Response:
        return await self.chats.list_models(request)

    async def _steps(self, request: Request) -> Response:
        return await self.steps.answer(request)

    async def _deployment(self, request: Request) -> Response:
        while not self.deployed.is_set():
            await asyncio.sleep(0.01)
        if self.deployment is None:
            return JSONResponse({"error": {"message": "the engine is starting"}}, 503)
        return JSONResponse(self.deployment)

    async def _tensors(self, request: Request) -> Response:
        if self.checkpoint is None:
            return JSONResponse({"error": {"message": "its files are not known"}}, 404)
        return JSONResponse(tensor_table(self.checkpoint))

    async def _tensor(self, request: Request) -> Response:
        assert self.checkpoint is not None
        name = request.path_params["name"]
        if name == "broken":
            return JSONResponse({"error": {"message": "the file is damaged"}}, 400)
        down, across = (float(request.query_params[place]) for place in ("down", "across"))
        return JSONResponse(tensor_slice(self.checkpoint, name, down, across))

    async def _chat(self, request: Request) -> Response:
        return await self.chats.chat(request)

    async def _simulate(self, request: Request) -> Response:
        """Runs that were recorded, of the same settings as far as there are any."""
        asked = await request.json()
        self.simulated.append(asked)
        while not self.simulating.is_set():
            await asyncio.sleep(0.01)
        runs = json.loads(RECORDED.read_text())
        alike = [[run["settings"][name] == asked[name] for name in CHOICES] for run in runs]
        return JSONResponse(runs[alike.index(max(alike, key=sum))])

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(PATIENCE)
        self._listener.close()


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def chats(site: Site) -> Chats:
    site.chats = Chats()
    return site.chats


@pytest.fixture
def steps(site: Site) -> Iterator[Steps]:
    site.steps = Steps()
    yield site.steps
    site.steps.num_cuts += 1


@pytest.fixture
def tab_at(browser: Browser) -> Iterator[Callable[[str], Page]]:
    """``tab_at(address)`` is an empty tab; nothing in one may complain by the end of the test."""
    tabs: list[Page] = []

    def tab_at(address: str) -> Page:
        tabs.append(Page(browser, address))
        return tabs[-1]

    yield tab_at
    complaints = [complaint for tab in tabs for complaint in tab.take_complaints()]
    for tab in tabs:
        browser.call("Target.disposeBrowserContext", browserContextId=tab.context)
    assert complaints == []


@pytest.fixture
def tab(tab_at: Callable[[str], Page], site: Site, chats: Chats) -> Page:
    """An empty tab for the page."""
    return tab_at(site.address)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], Any]], None]:
    def wait_until(condition: Callable[[], Any]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)

    return wait_until
