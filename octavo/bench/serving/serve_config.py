"""The settings of ``octavo bench serve``, named as ``vllm bench serve`` names them.

Settings of the workload and its times are in `octavo.workload.settings`, which other commands
share.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.options import option
from octavo.workload.settings import LoadSettings, Workload, at_least

BACKENDS = ("openai", "vllm", "openai-chat")
SHOWN = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")


@dataclass(frozen=True)
class ServerTarget:
    """The server and its requests. Raises ConfigError for a value that is out of range."""

    base_url: str | None = option(
        None, "server to measure, such as http://127.0.0.1:8000; without it, one is started"
    )
    backend: str = option("openai", "which API is asked: completions, or chat", BACKENDS)
    endpoint: str | None = option(
        None, "path of the API; default: /v1/completions or /v1/chat/completions"
    )
    model_name: str | None = option(
        None, "what requests call the model; default: what /v1/models says"
    )
    tokenizer: str | None = option(
        None, "model whose tokenizer makes and counts prompts; default: MODEL"
    )
    prompt_format: str = option(
        "ids",
        "how made-up prompts are sent to completions: as token ids, or as the text of these for "
        "servers that take no ids",
        ("ids", "text"),
    )
    api_key: str | None = option(None, "key of the server; default: $OPENAI_API_KEY")
    header: tuple[str, ...] = option((), "a further header, NAME=VALUE; may be repeated")
    insecure: bool = option(False, "do not check the certificate of an https server")
    request_timeout: float = option(6 * 3600.0, "seconds after which a request has failed")
    ready_check_timeout_sec: float | None = option(
        None,
        "seconds to wait for the server to answer a first request; 0 does not try; default: 600, "
        "or 5 where nothing answers at its address",
    )
    num_warmups: int = option(0, "requests before those that are measured")

    def __post_init__(self) -> None:
        at_least(0, self, "num_warmups")
        if self.ready_check_timeout_sec is not None:
            at_least(0, self, "ready_check_timeout_sec")
        if not self.request_timeout > 0:
            raise ConfigError("request_timeout must be above 0")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError(f"endpoint begins with a /, not {self.endpoint!r}")
        self.headers  # noqa: B018 - checks them

    @property
    def path(self) -> str:
        chat = self.backend == "openai-chat"
        return self.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")

    @property
    def headers(self) -> dict[str, str]:
        found = key_values("header", self.header)
        if self.api_key:
            found["Authorization"] = f"Bearer {self.api_key}"
        return found


@dataclass(frozen=True)
class ServedWorkload(Workload):
    """A workload, with the fields of every request's body. Raises ConfigError likewise."""

    temperature: float = option(0.0, "0 is greedy")
    top_p: float | None = option(None, "sample from the smallest set with this probability")
    top_k: int | None = option(None, "sample from the K most likely tokens")
    min_p: float | None = option(None, "drop tokens below P times the most likely one's")
    presence_penalty: float | None = option(None, "lower tokens that occurred")
    frequency_penalty: float | None = option(None, "lower tokens by how often they occurred")
    repetition_penalty: float | None = option(None, "divide the score of tokens that occurred")
    ignore_eos: bool = option(False, "go on after the end-of-text token: all answers are as long "
                              "as asked for, where the server knows the field")  # fmt: skip
    extra_body: str | None = option(None, "JSON of further fields of a request's body")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fields  # noqa: B018 - checks them

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of every request's body, beside prompt and length."""
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        names = ("top_p", "top_k", "min_p", *penalties)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.ignore_eos:
            given["ignore_eos"] = True
        return {"temperature": self.temperature, **given, **self._extra_fields()}

    def _extra_fields(self) -> dict[str, Any]:
        if self.extra_body is None:
            return {}
        try:
            extra = json.loads(self.extra_body)
        except ValueError as error:
            raise ConfigError(f"extra_body is no JSON: {error}") from error
        if not isinstance(extra, dict):
            raise ConfigError('extra_body is no JSON object, such as {"min_tokens": 8}')
        return extra


@dataclass(frozen=True)
class ReportSettings:
    """Settings of the report. Raises ConfigError for a value that is out of range."""

    goodput: tuple[str, ...] = option(
        (), "limits that a good request meets, in ms: ttft:200 tpot:50 e2el:5000"
    )
    percentile_metrics: str = option(
        "ttft,tpot,itl,e2el", f"latencies to print, of {', '.join(SHOWN)}"
    )
    metric_percentiles: str = option("90,99", "percentiles to tell of each")
    steady_state_share: float = option(
        0.8, "of the most requests in flight, what counts as the steady state"
    )
    label: str | None = option(None, "of the result, and of its name; default: the backend")
    metadata: tuple[str, ...] = option((), "KEY=VALUE to keep with the result")
    save_result: bool = option(False, "write the result in vLLM's format")
    save_detailed: bool = option(False, "with what became of each request")
    result_dir: str | None = option(None, "folder of the result")
    result_filename: str | None = option(None, "its name; default: vLLM's pattern")
    append_result: bool = option(False, "append it, as one line, to what is there")
    request_log: str | None = option(None, "file of one JSON object for each request")
    request_log_format: str = option("octavo", "its format", ("octavo", "aiperf"))

    def __post_init__(self) -> None:
        from octavo.measure.slo import RequestSlo

        RequestSlo.from_texts(self.goodput)
        key_values("metadata", self.metadata)
        self.percents  # noqa: B018 - checks them
        if unknown := sorted(set(self.shown) - set(SHOWN)):
            raise ConfigError(f"percentile_metrics: {unknown[0]!r} is none of {', '.join(SHOWN)}")
        if not 0 < self.steady_state_share <= 1:
            raise ConfigError("steady_state_share must be in (0, 1]")

    @property
    def shown(self) -> tuple[str, ...]:
        names = (part.strip() for part in self.percentile_metrics.split(","))
        return tuple(name for name in names if name)

    @property
    def percents(self) -> tuple[float, ...]:
        try:
            found = tuple(float(part) for part in self.metric_percentiles.split(",") if part)
        except ValueError:
            found = (-1.0,)
        if not all(0 <= percent <= 100 for percent in found):
            raise ConfigError(
                f"metric_percentiles: {self.metric_percentiles!r} is no list such as 50,90,99"
            )
        return found


@dataclass(frozen=True)
class ServeBenchConfig:
    """All settings of ``octavo bench serve``.

    Args:
        model: of the server that is started; beside a ``base_url``, the one whose tokenizer is
            used, where that can be loaded.
        server_flags: command line of the server that is started.
    """

    model: str | None = None
    target: ServerTarget = field(default_factory=ServerTarget)
    workload: ServedWorkload = field(default_factory=ServedWorkload)
    load: LoadSettings = field(default_factory=LoadSettings)
    report: ReportSettings = field(default_factory=ReportSettings)
    server_flags: tuple[str, ...] = ()

    def at_url(self, base_url: str) -> ServeBenchConfig:
        """Return the same load on another server."""
        return replace(self, target=replace(self.target, base_url=base_url))


def key_values(name: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Parse texts ``KEY=VALUE``. Raises ConfigError, naming the setting."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{name}: {text!r} is no NAME=VALUE")
        found[key.strip()] = value.strip()
    return found
