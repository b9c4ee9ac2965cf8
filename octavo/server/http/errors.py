"""Turn every exception into an HTTP answer with OpenAI's error body.

A body says what the client did wrong, or that it was not the client's fault; never more. Details
of the server's own faults go to the log.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from octavo.base.errors import (
    ChatTemplateError,
    DeadlineError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
    QuarantinedError,
    QueueFullError,
    RequestError,
)
from octavo.server.http.tenants import RateLimitError

logger = logging.getLogger("octavo.server")

MAX_MESSAGE_CHARS = 2000

# OpenAI's and Anthropic's types of errors by status; others are one of the last two.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Of the error for an unknown model: characters of its name, and names that there are.
_MAX_NAME_CHARS, _MAX_NAMES = 200, 20
_CLIENT_ERROR, _SERVER_ERROR = "invalid_request_error", "server_error"


class HttpError(Exception):
    """An exception that becomes the error answer of a request.

    Args:
        status: the HTTP status.
        message: for people; no more than `MAX_MESSAGE_CHARS` of it are sent.
        type: a class of errors; by default the usual one for the status.
        param: dotted path of the field that is wrong.
        code: a name that programs can compare.
        headers: further response headers.
        facts: members of the error beside these, for APIs that have such.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, _SERVER_ERROR if status >= 500 else _CLIENT_ERROR)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.facts = dict(facts or {})


def to_http_error(error: BaseException) -> HttpError:
    """Return the answer to any exception. A fault of the server is logged here, with its
    traceback."""
    match error:
        case HttpError():
            return error
        case InvalidRequestError():
            return HttpError(400, str(error), param=error.field)
        case PromptTooLongError():
            facts = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.limit}
            return HttpError(400, str(error), code="context_length_exceeded", facts=facts)
        case RateLimitError():
            headers = _retry_headers(error.retry_after)
            return HttpError(429, str(error), code="rate_limit_exceeded", headers=headers)
        case QueueFullError() | EngineUnavailableError():
            return HttpError(503, str(error), headers=_retry_headers(error.retry_after))
        case RequestError() | ChatTemplateError():
            return HttpError(400, str(error))
        case ModelNotFoundError():
            # Its message may name folders of this machine.
            return HttpError(404, "The model does not exist.", code="model_not_found")
        case DeadlineError():
            return HttpError(504, str(error), code="timeout", headers={"x-should-retry": "false"})
        case QuarantinedError():
            return HttpError(500, str(error), headers={"x-should-retry": "false"})
        case RequestValidationError():  # of the query: bodies are read elsewhere
            problem = error.errors()[0]
            name = str(problem["loc"][-1])
            return HttpError(400, f"{name}: {problem['msg']}", param=name)
        case HTTPException():  # of the router: no such route, or not with this method
            return HttpError(error.status_code, str(error.detail), headers=error.headers)
        case EngineError():
            logger.error("the engine failed: %s", error)  # its own log has the traceback
            # The same request would most likely meet the same bug.
            headers = {"x-should-retry": "false"}
            message = "The engine failed while it worked on this request."
            return HttpError(500, message, headers=headers)
        case _:
            logger.error("unexpected %s", type(error).__name__, exc_info=error)
            return HttpError(500, "internal error")


def error_body(error: HttpError) -> dict[str, Any]:
    """Return the JSON object that describes an error, as a body or as the event of a stream."""
    return {
        "error": {
            "message": _printable(error.message),
            "type": error.type,
            "param": None if error.param is None else _printable(error.param),
            "code": error.code,
        }
    }


def error_response(error: HttpError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status, error.headers)


def model_not_found(name: str, served: Sequence[str]) -> HttpError:
    """Return the error for a model that is not served, with the names that are: those like it, or
    the first few."""
    name = name[:_MAX_NAME_CHARS]
    near = difflib.get_close_matches(name, served, n=2, cutoff=0.5) if len(served) > 1 else []
    shown = ", ".join(served[:_MAX_NAMES]) + (", …" if len(served) > _MAX_NAMES else "")
    hint = f"did you mean {' or '.join(near)}?" if near else f"there is {shown}."
    message = f"The model {name!r} does not exist; {hint}"
    return HttpError(404, message, param="model", code="model_not_found")


def _retry_headers(retry_after: float | None) -> dict[str, str]:
    """Return headers that make clients try again ``retry_after`` seconds from now (1 if
    unknown)."""
    seconds = 1.0 if retry_after is None else max(retry_after, 0.001)
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(math.ceil(seconds * 1000)),
        "x-should-retry": "true",
    }


def _printable(text: str) -> str:
    """Return a text of bounded length without lone surrogates, which cannot be written as UTF-8."""
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
