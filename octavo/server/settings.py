"""The settings of the server. Those of the engine are `EngineArgs`.

Like there, the fields here are the one owner of names, defaults and help texts: the flags of
``octavo serve`` are made from them.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from octavo.base.errors import ConfigError
from octavo.base.options import check_least, option, parse_duration
from octavo.core.limits import DEFAULT_OUTPUT_TOKENS

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")

# Bounds of the HTTP framing that no setting changes.
MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_URL_BYTES = 8 << 10
HEADER_TIMEOUT = 15.0  # seconds for the header of a request to arrive
BODY_TIMEOUT = 30.0  # seconds without a byte of an unfinished body

# Bounds of what one request may ask for, beside those of SamplingParams.
MAX_PROMPTS = 256
MAX_SAMPLES = 1024  # of all prompts together
MAX_STOP_CHARS = 4096  # of all stop strings together
MAX_ID_CHARS = 128  # of a client's request id

_BODY_MEMORY = 256 << 20

# Defaults of settings that are None where they were not given, so that one without effect is seen.
DEFAULT_TARGET_TTFT, DEFAULT_SCALE_DOWN_AFTER, DEFAULT_LEASE_TIMEOUT = 1.0, 60.0, 600.0  # seconds

# Names of routers, as in octavo.core.routing, which a test checks; --help need not import it.
ROUTER_NAMES = ("prefix_aware", "least_loaded", "round_robin")  # the first is the default

# A level is worth many steps of waiting: with more of them the lowest would hardly ever begin.
MAX_PRIORITY_RANGE = 100


@dataclass(frozen=True)
class ServerSettings:
    """Settings of ``octavo serve``. A tuple is a flag that may be repeated.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every network")
    port: int = option(8000, "port to listen on; 0 takes a free one and says which")
    api_key: tuple[str, ...] = option(
        (), "a key that clients must send; all users of this machine see it; may be repeated"
    )
    api_key_file: str | None = option(
        None,
        "file of keys, one a line; # begins a comment; weight=2 behind a key gives it twice the "
        "tokens of others while these wait (1)",
    )
    admin_key: tuple[str, ...] = option(
        (),
        "an operator's key, needed for what concerns all clients (/steps, /metrics, /load, /slots, "
        "/octavo/tensors, /octavo/replicas) where there are API keys; may be repeated",
    )
    served_model_name: tuple[str, ...] = option(
        (), "a name of the model for clients, * is any; answers have the first; may be repeated"
    )
    model_dir: str | None = option(
        None, "a DIR of models, each of which is loaded when a request names it"
    )
    model_memory: int | str | None = option(
        None,
        "memory that all loaded models may take together, such as 8GiB: weights, KV and "
        "activations (default: three quarters of what is free)",
    )
    idle_unload: float | None = option(
        None, "seconds without a request after which a model is unloaded", least=0.0
    )
    pin: tuple[str, ...] = option(
        (), "a model's name that is not unloaded to make room, or when idle; may be repeated"
    )
    allowed_origin: tuple[str, ...] = option(
        (), "a web page's origin that may call from a browser, such as https://example.org"
    )
    allowed_host: tuple[str, ...] = option(
        (), "a further name of this server in the Host header of clients; * is any"
    )
    strict_fields: bool = option(
        False, "refuse requests with fields that have no effect here, rather than drop the fields"
    )
    max_concurrent_per_key: int | None = option(
        None, "completions of one key at once, waiting and running: n = 4 counts as four", least=1
    )
    max_work_per_key: int | None = option(
        None,
        "tokens of one key at once, waiting and running: prompt and max_tokens of each completion",
        least=1,
    )
    max_work: int | None = option(None, "tokens of all keys at once, counted likewise", least=1)
    max_output_tokens: int | None = option(
        None,
        "most tokens of one answer; default: as the context allows, and "
        f"{DEFAULT_OUTPUT_TOKENS:,} where a sliding window lets answers outgrow it",
        least=1,
    )
    max_unread_bytes: int | str = option(
        "1GiB", "memory for generated output that clients have not read yet, of all answers"
    )
    allow_window: bool = option(
        False,
        "let requests set a sliding window and attention sinks, and so get answers beyond the "
        "context; where --window sets one for all, they may anyway",
    )
    rate_limit_requests: float | None = option(None, "requests a minute of one key")
    rate_limit_tokens: float | None = option(None, "prompt and output tokens a minute of one key")
    max_predicted_ttft: float | str | None = option(
        None,
        "refuse requests whose predicted TTFT is longer, given those before them: milliseconds, "
        "or a time such as 0.5s",
    )
    target_ttft: float | str | None = option(
        None,
        "where replicas come and go: one more is started when the predicted TTFT stays longer than "
        "that: milliseconds, or a time such as 0.5s (default: 1s)",
    )
    scale_down_after: float | None = option(
        None,
        "seconds for which one replica less would have done, before one is drained (default: 60)",
        least=0.0,
    )
    allow_open_ray: bool = option(
        False,
        "use a Ray cluster that asks for no token, where all who reach it may run what they like",
    )
    lease_timeout: float | None = option(
        None,
        "seconds to wait for a place of a replica in a Ray cluster (default: 600)",
        least=0.0,
    )
    router: str | None = option(
        None,
        "how the replica of a request is chosen: the one with the least to compute, what is cached "
        "there deducted (the default); with the fewest requests; or each in turn",
        ROUTER_NAMES,
    )
    max_local_prefill_length: int | None = option(
        None,
        "with prefill_replicas, the most tokens of a prompt that are computed where its answer is, "
        "what is cached there deducted; default: as many as take less time than their KV would to "
        "be passed on",
        least=0,
    )
    resume_streams: bool = option(
        False,
        "go on with the answers of an engine that died, on another one or the next, rather than "
        "end streams that have begun with an error; they stay the same, to the token",
    )
    priority_range: int = option(
        0, "how far from 0 the priority of a client's request may be; 0 treats all alike"
    )
    max_body_bytes: int = option(8 << 20, "largest request body", least=1)
    max_body_memory: int | None = option(
        None,
        "bytes for the bodies of all requests together; one address may have half of them "
        "(default: 256 MiB, or twice max_body_bytes if that is more)",
    )
    max_connections: int = option(4096, "connections at once", least=1)
    max_connections_per_address: int = option(
        1024,
        "connections of one address; 0 is no limit, for a server behind a proxy with its own",
        least=0,
    )
    request_timeout: float | None = option(
        None, "seconds after which a request without a timeout of its own ends"
    )
    drain_timeout: float = option(
        30.0, "seconds for running requests after SIGTERM; 0 stops now", least=0.0
    )
    sse_keep_alive: float = option(
        15.0, "seconds without data after which a stream sends a comment", least=0.0
    )
    slow_reader_timeout: float = option(
        30.0, "seconds without reading anything after which a client is cut off", least=0.0
    )
    engine_timeout: float = option(
        300.0, "seconds without a message after which the engine is restarted", least=0.0
    )
    response_cache: int | str = option(
        0, "memory for answers to repeated deterministic requests, such as 64MiB; 0 is off"
    )
    response_store: int | str = option(
        "64MiB",
        "memory for answers of /v1/responses that later requests may refer to, up to an hour after "
        "their last use; 0 keeps none",
    )
    chat_template: str | None = option(None, "file with the chat template to use instead")
    trust_request_chat_template: bool = option(False, "let requests bring their own chat template")
    log_format: str = option("text", "log lines as text or as JSON", ("text", "json"))
    log_level: str = option("info", "what to log", ("debug", "info", "warning", "error"))
    log_prompts: bool = option(False, "write prompts and answers to the log")
    status_interval: float = option(
        10.0, "seconds between status lines while busy; 0 is none", least=0.0
    )

    def __post_init__(self) -> None:
        check_least(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], not {self.port}")
        for name in ("rate_limit_requests", "rate_limit_tokens", "request_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value}")
        least = 2 * self.max_body_bytes
        if self.body_memory < least:
            raise ConfigError(
                f"max_body_memory must be at least {least}, twice max_body_bytes: one address may "
                "have half of it"
            )
        self.max_predicted_ttft_seconds  # noqa: B018 - checks it
        self.target_ttft_seconds  # noqa: B018 - likewise
        if not 0 <= self.priority_range <= MAX_PRIORITY_RANGE:
            raise ConfigError(
                f"priority_range must be in [0, {MAX_PRIORITY_RANGE}], not {self.priority_range}"
            )
        if any(not key.strip() for key in self.admin_key):
            raise ConfigError("admin_key is empty: give a key, or leave the flag out")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("api_key is empty: give a key, or leave the flag out to serve openly")

    @property
    def has_registry(self) -> bool:
        """True if a setting is given that is for models which come and go."""
        return bool(
            self.model_dir is not None
            or self.model_memory is not None
            or self.idle_unload is not None
            or self.pin
        )

    @property
    def body_memory(self) -> int:
        """``max_body_memory``, or its default."""
        if self.max_body_memory is not None:
            return self.max_body_memory
        return max(_BODY_MEMORY, 2 * self.max_body_bytes)

    @property
    def max_predicted_ttft_seconds(self) -> float | None:
        """``max_predicted_ttft`` in seconds; None is no limit."""
        return self._seconds("max_predicted_ttft")

    @property
    def target_ttft_seconds(self) -> float | None:
        """``target_ttft`` in seconds; None where it was not given."""
        return self._seconds("target_ttft")

    def _seconds(self, name: str) -> float | None:
        value = getattr(self, name)
        if value is None:
            return None
        try:
            return parse_duration(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    @property
    def is_loopback(self) -> bool:
        """True if only programs on this machine can reach the server."""
        return self.host in LOOPBACK or self.host.startswith("127.")
