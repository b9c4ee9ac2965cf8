"""Parse the bytes of a request into the model of its body, or into a 400 that says what is
wrong."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.http.background import in_background
from octavo.server.http.context import REFUSED_CONSTRAINT, IgnoredFields, request_context
from octavo.server.http.errors import HttpError, to_http_error
from octavo.server.http.json_text import parse

LARGE_BODY = 16 << 10  # bytes beyond which reading a body leaves the event loop
MAX_PROBLEMS = 10
# Types that a browser sends to any origin without a preflight, by the Fetch standard.
_SIMPLE_TYPES = ("application/x-www-form-urlencoded", "text/plain")

P = ParamSpec("P")
T = TypeVar("T")

# Messages in place of pydantic's own.
_MESSAGES = {"missing": "is required", "extra_forbidden": "is not a known field"}


# The type of pydantic's errors of fields that constrain the answer.
CONSTRAINT = "constraint"


class ConstraintRefusal(HttpError):
    """A 400 for a body with a constraint on the answer that is none."""


class JsonRoute(APIRoute):
    """A route whose endpoint takes a pydantic model as its body, and no other parameter from it.

    ``APIRouter(route_class=JsonRoute)`` makes all POST routes of a router such. The model is
    validated here, off the event loop if the body is large, and every problem is a 400.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        self.strict_content_type = False  # no content type is as good as JSON's
        answer = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def read_and_answer(request: Request) -> Response:
            if model is not None:
                if _check_content_type(request) in _SIMPLE_TYPES:
                    _set_json_type(request)
                body = await request.body()
                ignored = request_context(request).ignored
                # Starlette takes this for the parsed body; an instance passes FastAPI unchanged.
                try:
                    request._json = await work_on_body(request, read_model, model, body, ignored)
                except ConstraintRefusal:
                    request.scope[REFUSED_CONSTRAINT] = "invalid"
                    raise
            return await answer(request)

        return read_and_answer


class DialectRoute(JsonRoute):
    """A route whose errors have the form of another API than OpenAI's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_errors(request: Request) -> Response:
            try:
                return await answer(request)
            except Exception as error:
                return await self._answer_error(request, to_http_error(error))

        return answer_errors

    async def _answer_error(self, request: Request, error: HttpError) -> Response:
        raise NotImplementedError


async def work_on_body(
    request: Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what a function makes of a request's body: off the event loop if that is large."""
    if len(await request.body()) > LARGE_BODY:
        return await in_background(function, *args, **kwargs)
    return function(*args, **kwargs)


def read_model(
    model: type[BaseModel], body: bytes, ignored: IgnoredFields | None = None
) -> BaseModel:
    """Return the body as a ``model``.

    Args:
        ignored: gets the names of fields that have no effect; see `octavo.server.api.fields`.

    Raises:
        HttpError: 400, if the body is not valid JSON or does not fit the model.
    """
    value = parse(body)
    if not isinstance(value, dict):
        raise HttpError(400, "The body must be a JSON object.", code="invalid_json")
    try:
        return model.model_validate(value, context=ignored)
    except ValidationError as error:
        raise _to_http_error(error, value) from None


def _check_content_type(request: Request) -> str | None:
    """Return the content type of a request, None if it has none.

    JSON is read under the types that clients send it with: ``curl -d`` calls it a form. A browser
    may send forms and plain text to other origins without a preflight, so from a browser these are
    not read, whatever the checks of Origin and Host before this one have let through.

    Raises:
        HttpError: 400, if it is a type that is not read.
    """
    given = request.headers.get("content-type")
    if given is None:
        return None
    kind, _, parameters = given.lower().partition(";")
    charset = parameters.replace(" ", "").replace('"', "").partition("charset=")[2]
    kinds = ("application/json", *(() if _is_browser(request) else _SIMPLE_TYPES))
    kind = kind.strip()
    if kind not in kinds or charset not in ("", "utf-8", "utf8"):
        raise HttpError(400, "Content-Type must be application/json, in UTF-8.")
    return kind


def _set_json_type(request: Request) -> None:
    """Set the content type to JSON: FastAPI checks it, although it gets the model."""
    others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
    request.scope["headers"] = [*others, (b"content-type", b"application/json")]
    if hasattr(request, "_headers"):  # Starlette's cache of them
        del request._headers


def _is_browser(request: Request) -> bool:
    """True if a request has headers that only browsers send: each of them sends several of
    these."""
    headers = request.headers
    return (
        any(name in headers for name in ("origin", "referer", "sec-fetch-site", "sec-fetch-mode"))
        or "mozilla" in headers.get("user-agent", "").lower()
    )


def _to_http_error(error: ValidationError, value: Any) -> HttpError:
    """Return an error with a line for each wrong field. Alternatives that a field failed are one
    line."""
    problems: dict[str, list[str]] = {}
    details = error.errors(include_url=False, include_context=False, include_input=False)
    for detail in details:
        path = _path(detail["loc"], value, detail["type"])
        message = _MESSAGES.get(detail["type"], detail["msg"])
        message = message.removeprefix("Value error, ").replace("Input should", "should")
        messages = problems.setdefault(path, [])
        if message not in messages:
            messages.append(message)
    lines = [
        f"{path}: {', or '.join(messages)}" if path else ", or ".join(messages)
        for path, messages in list(problems.items())[:MAX_PROBLEMS]
    ]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    is_constraint = any(detail["type"] == CONSTRAINT for detail in details)
    kind = ConstraintRefusal if is_constraint else HttpError
    return kind(400, "; ".join(lines), param=next(iter(problems)) or None)


def _path(location: Sequence[int | str], value: Any, kind: str) -> str:
    """Return the dotted path in the body: a location without pydantic's names of alternatives."""
    path = []
    for step in location:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            if not (kind == "missing" and step == location[-1]):
                continue
        path.append(str(step))
    return ".".join(path)
