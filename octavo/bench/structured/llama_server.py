"""`LlamaServer`, a running server of llama.cpp that answers under the same schemas."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.base.errors import BenchmarkError

_TIMEOUT = 600.0  # seconds of an answer


class LlamaAnswer(NamedTuple):
    """An answer, and its tokens a second after the first."""

    text: str
    is_finished: bool
    num_tokens: int
    decode_tps: float


class LlamaServer:
    """A client of llama-server's ``/completion``.

    Args:
        url: http://host:port
    """

    def __init__(self, url: str):
        if not url.startswith(("http://", "https://")):
            raise BenchmarkError(f"--llama-server: {url!r} is no URL such as http://127.0.0.1:8080")
        self._url = url.rstrip("/")

    def answer(
        self, prompt: str, max_tokens: int, schema: Mapping[str, Any] | None = None
    ) -> LlamaAnswer:
        """Return a greedy answer, of exactly ``max_tokens`` where there is no schema.

        Raises:
            BenchmarkError: the server does not answer, or with something else.
        """
        asked: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "cache_prompt": False,
            **({"ignore_eos": True} if schema is None else {"json_schema": schema}),
        }
        request = urllib.request.Request(
            f"{self._url}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                found = json.load(response)
            timings = found["timings"]
            return LlamaAnswer(
                str(found["content"]),
                found.get("stop_type") == "eos",
                int(timings["predicted_n"]),
                float(timings["predicted_per_second"]),
            )
        except urllib.error.HTTPError as error:
            message = error.read(2000).decode(errors="replace")
            raise BenchmarkError(f"llama-server: {error.code} {message}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"llama-server at {self._url}: {error!r}") from error
