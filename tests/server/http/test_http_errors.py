from __future__ import annotations

import inspect
import json
import logging

import pytest
from starlette.exceptions import HTTPException

from octavo.base import errors
from octavo.base.errors import (
    ChatTemplateError,
    ConfigError,
    DeadlineError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    PromptTooLongError,
    QuarantinedError,
    QueueFullError,
    RequestError,
)
from octavo.server.http.errors import (
    MAX_MESSAGE_CHARS,
    HttpError,
    error_body,
    error_response,
    model_not_found,
    to_http_error,
)
from octavo.server.http.tenants import RateLimitError

NEVER = {"x-should-retry": "false"}


@pytest.mark.parametrize(
    "error, status, type, param, code",
    [
        (InvalidRequestError("no", "top_p"), 400, "invalid_request_error", "top_p", None),
        (InvalidRequestError("no"), 400, "invalid_request_error", None, None),
        (RequestError("no"), 400, "invalid_request_error", None, None),
        (ChatTemplateError("no"), 400, "invalid_request_error", None, None),
        (
            PromptTooLongError("long", 9, 8),
            400,
            "invalid_request_error",
            None,
            "context_length_exceeded",
        ),
        (model_not_found("gpt", ("tiny",)), 404, "not_found_error", "model", "model_not_found"),
        (ModelNotFoundError("/x"), 404, "not_found_error", None, "model_not_found"),
        (
            RateLimitError("concurrency", 1.0),
            429,
            "rate_limit_error",
            None,
            "rate_limit_exceeded",
        ),
        (QueueFullError("full"), 503, "overloaded_error", None, None),
        (EngineUnavailableError("stopping"), 503, "overloaded_error", None, None),
        (DeadlineError("late"), 504, "timeout_error", None, "timeout"),
        (QuarantinedError("again"), 500, "server_error", None, None),
        (EngineError("bug"), 500, "server_error", None, None),
        (KeyError("bug"), 500, "server_error", None, None),
        (ConfigError("bug"), 500, "server_error", None, None),
        (HTTPException(405, headers={"allow": "GET"}), 405, "invalid_request_error", None, None),
    ],
)
def test_every_error_has_its_answer(error, status, type, param, code):
    http_error = to_http_error(error)
    got = (http_error.status, http_error.type, http_error.param, http_error.code)
    assert got == (status, type, param, code)
    assert set(error_body(http_error)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "error", [QueueFullError, EngineUnavailableError, lambda _, s: RateLimitError("concurrency", s)]
)
@pytest.mark.parametrize(
    "seconds, header, header_ms",
    [(0.0, "1", "1"), (0.25, "1", "250"), (1.5, "2", "1500"), (60.0, "60", "60000")],
)
def test_overload_says_when_to_come_back(error, seconds, header, header_ms):
    headers = to_http_error(error("no", seconds)).headers
    assert headers == {
        "retry-after": header,
        "retry-after-ms": header_ms,
        "x-should-retry": "true",
    }


def test_overload_without_an_estimate_is_a_second():
    assert to_http_error(QueueFullError("full")).headers["retry-after"] == "1"


def test_what_would_fail_again_is_not_to_be_retried():
    assert to_http_error(DeadlineError("late")).headers == NEVER
    assert to_http_error(QuarantinedError("again")).headers == NEVER


@pytest.mark.parametrize(
    "error",
    [
        KeyError("secret"),
        EngineError("secret 0x7f001234"),
        ModelFileError("/secret/path", "damaged"),
        ModelNotFoundError("/secret/path"),
        RuntimeError("secret"),
    ],
)
def test_our_own_faults_are_told_to_the_log_only(error, caplog):
    with caplog.at_level(logging.ERROR, "octavo.server"):
        text = json.dumps(error_body(to_http_error(error)))
    assert "secret" not in text and "0x" not in text and "Traceback" not in text
    if not isinstance(error, ModelNotFoundError):
        assert "secret" in caplog.text
        if not isinstance(error, EngineError):  # whose traceback is in the engine's own log
            assert caplog.records[0].exc_info[1] is error


def test_faults_of_the_client_are_not_logged(caplog):
    for error in (InvalidRequestError("no"), QueueFullError("full"), DeadlineError("late")):
        to_http_error(error)
    assert not caplog.records


def test_no_error_of_ours_was_forgotten():
    """Each class under RequestError and EngineError is answered on purpose, not as unknown."""
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.RequestError | errors.EngineError | errors.DeadlineError):
            arguments = ("text", 2, 1) if kind is PromptTooLongError else ("text",)
            assert to_http_error(kind(*arguments)).message != "internal error"


def test_an_http_error_is_its_own_answer():
    error = HttpError(418, "no coffee", type="teapot", headers={"x-pot": "1"})
    assert to_http_error(error) is error
    response = error_response(error)
    assert (response.status_code, response.headers["x-pot"]) == (418, "1")
    assert json.loads(response.body)["error"]["type"] == "teapot"


def test_headers_of_the_router_are_kept():
    error = to_http_error(HTTPException(405, headers={"allow": "GET"}))
    assert error.headers == {"allow": "GET"}


def test_messages_are_bounded_and_can_be_sent():
    error = HttpError(400, "\ud800" + "x" * 100_000, param="a.\udfff")
    body = json.loads(error_response(error).body)["error"]
    assert len(body["message"]) == MAX_MESSAGE_CHARS
    assert body["message"].startswith("?x") and body["param"] == "a.?"


def test_long_model_names_are_cut():
    assert len(model_not_found("x" * 100_000, ("tiny",)).message) < 300
