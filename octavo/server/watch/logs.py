"""Set up the server's logs on stderr, and write a line for each request.

Prompts and answers are logged only with ``--log-prompts``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.prefix_cache import MissReason
from octavo.server.engine.generation import EngineObserver, Generation
from octavo.server.log_lines import create_formatter, log_event
from octavo.server.settings import ServerSettings
from octavo.serving.outputs import Delta

MAX_LOGGED_CHARS = 16_384  # of one prompt or answer
MAX_IGNORED_NAMES = 256  # of fields, each of which has a line


def configure_logging(settings: ServerSettings) -> None:
    """Send the logs of octavo, uvicorn and asyncio to stderr as the settings say. May be
    repeated.

    Uvicorn must be run with ``log_config=None``. Its access log is off: `RequestLog` says more.
    """
    handler = _OctavoHandler(sys.stderr)
    handler.setFormatter(create_formatter(settings.log_format))
    level = settings.log_level.upper()
    _route("octavo", handler, level)
    for name in ("uvicorn", "asyncio"):
        _route(name, handler, "WARNING" if level == "INFO" else level)
    for name in ("uvicorn.error", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)  # an earlier run of uvicorn may have set it
    access_log = logging.getLogger("uvicorn.access")
    access_log.handlers, access_log.propagate = [logging.NullHandler()], False


class _OctavoHandler(logging.StreamHandler[Any]):
    """A handler known by its type, so that configuring again replaces it."""


def _route(name: str, handler: logging.Handler, level: str) -> None:
    logger = logging.getLogger(name)
    logger.handlers = [old for old in logger.handlers if not isinstance(old, _OctavoHandler)]
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class RequestLog(EngineObserver):
    """Logs one line for each request that is over.

    Args:
        decode: turns token ids into text. With it, prompts and answers are logged too, each up to
            `MAX_LOGGED_CHARS`; an answer that did not come to its end is not.
        later: runs a function that decodes outside the event loop; by default it runs at once.
        model: its name in the lines of a server with several models; "" of one.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str] | None = None,
        later: Callable[[Callable[[], None]], None] = lambda function: function(),
        model: str = "",
    ):
        self._decode, self._later = decode, later
        self._model = model
        self._ignored_fields: set[str] = set()

    def on_submitted(self, generation: Generation) -> None:
        decode = self._decode
        if decode is None:
            return
        # A token has seldom less than a character: no need to decode a whole book.
        token_ids = generation.request.prompt_token_ids[:MAX_LOGGED_CHARS]
        self._later(lambda: self._log_text(generation, "prompt", decode(token_ids)))
        generation.record(self._log_answers)

    def on_ignored_fields(self, names: Sequence[str]) -> None:
        """Log a line for each name, the first time that it comes."""
        for name in names:
            if name not in self._ignored_fields and len(self._ignored_fields) < MAX_IGNORED_NAMES:
                self._ignored_fields.add(name)
                text = f"the field {name} of requests has no effect here; not said again"
                log_event("field ignored", text, {"field": name})

    def on_finished(self, generation: Generation, reason: str) -> None:
        fields = request_fields(generation, reason)
        message = _readable(fields)
        if self._model:
            message, fields = f"{self._model}: {message}", {"model": self._model, **fields}
        level = logging.WARNING if reason in ("error", "timeout") else logging.INFO
        log_event("request finished", message, fields, level)

    def _log_answers(self, generation: Generation, deltas: list[Delta]) -> None:
        for index in range(generation.request.params.num_samples):
            text = "".join(delta.text for delta in deltas if delta.index == index)
            self._log_text(generation, f"answer {index}", text)

    def _log_text(self, generation: Generation, what: str, text: str) -> None:
        text = text if len(text) <= MAX_LOGGED_CHARS else text[:MAX_LOGGED_CHARS] + "…"
        request = generation.request
        fields = {"external_id": request.external_id, "request_id": request.request_id}
        log_event(what, f"{request.request_id} {what}: {text}", {**fields, "text": text})


def request_fields(generation: Generation, reason: str) -> dict[str, Any]:
    """Return the log fields of a finished request; docs/metrics.md defines them. Unknown ones are
    None."""
    request, stats = generation.request, generation.stats
    decode_tps = None
    num_later = stats.num_output_tokens - request.params.num_samples
    if stats.decode_time and num_later > 0:
        decode_tps = num_later / stats.decode_time
    return {
        "external_id": request.external_id,
        "request_id": request.request_id,
        "route": request.route,
        "tenant": request.tenant,
        "prompt_tokens": stats.num_prompt_tokens,
        "cached_tokens": stats.num_cached_tokens,
        "miss_reason": stats.miss_reason,
        "output_tokens": stats.num_output_tokens,
        "n": request.params.n,
        "ttft_ms": _milliseconds(stats.ttft),
        "tpot_ms": _milliseconds(stats.tpot),
        "e2e_ms": _milliseconds(stats.e2e),
        "queue_ms": _milliseconds(stats.queue_time),
        "decode_tps": None if decode_tps is None else round(decode_tps, 2),
        "preemptions": stats.num_preemptions,
        "from_cache": generation.is_from_cache,
        "reason": reason,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _readable(fields: Mapping[str, Any]) -> str:
    """``request_id route tenant: prompt 12 (8 cached), output 5, TTFT 23 ms, ...: stop``"""
    external_id, request_id = fields["external_id"], fields["request_id"]
    cached, miss = fields["cached_tokens"], fields["miss_reason"]
    why = f", then {miss}" if miss not in ("", MissReason.BLOCK_BORDER.value) else ""
    parts = [f"prompt {fields['prompt_tokens']} ({cached} cached{why})"]
    parts.append(f"output {fields['output_tokens']}")
    if fields["n"] > 1:
        parts.append(f"n {fields['n']}")
    for name in ("ttft", "tpot", "e2e", "queue"):
        value = fields[f"{name}_ms"]
        if value is not None:
            label = name if name == "queue" else name.upper()
            parts.append(f"{label} {value:.{1 if value < 100 else 0}f} ms")
    if fields["decode_tps"] is not None:
        parts.append(f"{fields['decode_tps']:.1f} tokens/s")
    if fields["preemptions"]:
        parts.append(f"preempted {fields['preemptions']}x")
    if fields["from_cache"]:
        parts.append("from the response cache")
    ids = request_id if external_id in ("", request_id) else f"{request_id} ({external_id})"
    who = " ".join(part for part in (ids, fields["route"], fields["tenant"]) if part)
    return f"{who}: {', '.join(parts)}, {fields['reason']}"
