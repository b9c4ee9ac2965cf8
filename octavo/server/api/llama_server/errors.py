"""Errors as llama.cpp's server has them: OpenAI's, with the counts of a prompt that is too long."""

from __future__ import annotations

from starlette.responses import JSONResponse

from octavo.server.http.errors import HttpError, error_body


def llama_error_response(error: HttpError, request_id: str = "") -> JSONResponse:
    """Return the answer to a request that has failed."""
    fields = error_body(error)["error"]
    if error.code == "context_length_exceeded":
        fields |= {"type": "exceed_context_size_error", **error.facts}
    return JSONResponse({"error": fields}, error.status, error.headers)
