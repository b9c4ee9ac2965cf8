"""Runs ``octavo bench serve``, which sends a workload to a server, and reports on it."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo import hub
from octavo.base.errors import ConfigError
from octavo.bench.record import Recorder
from octavo.bench.serving import load
from octavo.bench.serving.endpoint import (
    Endpoint,
    Patience,
    served_model,
    server_url,
    wait_until_listening,
    wait_until_ready,
)
from octavo.bench.serving.http_client import HttpClient
from octavo.bench.serving.load import send_load
from octavo.bench.serving.serve_config import ServeBenchConfig, key_values
from octavo.bench.serving.server_process import running_server
from octavo.hub import DEFAULT_MODEL
from octavo.measure.load_report import LoadReport, create_report
from octavo.measure.request_log import write_request_log
from octavo.measure.request_record import RequestRecord
from octavo.measure.serve_report import ServeSummary, save_result, to_json, to_text
from octavo.measure.slo import RequestSlo
from octavo.workload.plan import LoadPlan, create_plan, create_requests
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]  # requests that have ended, and all


@dataclass(frozen=True)
class ServeResult:
    """The report on a run, with all that its output needs."""

    report: LoadReport
    summary: ServeSummary
    run: dict[str, Any]
    config: ServeBenchConfig
    is_interrupted: bool

    def as_json(self) -> dict[str, Any]:
        return to_json(
            self.report, self.summary, self.run, is_detailed=self.config.report.save_detailed
        )

    def as_text(self) -> str:
        return to_text(self.report, self.summary, self.config.report.shown)

    def write_files(self) -> list[str]:
        """Write the files that the settings ask for; return their paths. Raises BenchmarkError."""
        settings = self.config.report
        written = []
        if settings.save_result or settings.append_result or settings.result_filename:
            path = save_result(
                self.as_json(),
                self.summary,
                settings.result_dir,
                settings.result_filename,
                append=settings.append_result,
            )
            written.append(str(path))
        if settings.request_log:
            write_request_log(
                settings.request_log, self.report.records, settings.request_log_format
            )
            written.append(settings.request_log)
        return written


def run_serve_bench(
    config: ServeBenchConfig,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> ServeResult:
    """Send the load to the server, which is started where there is no ``base_url``.

    Ctrl-C ends the sending; the result then has the records so far.

    Args:
        progress: called with (requests that have ended, requests in all).
        say: called with the reason for waiting.

    Raises:
        ServerError: the server is not there, or answers no request.
        ConfigError, WorkloadFileError: the settings contradict each other, or a file is
            damaged.
    """
    if config.target.base_url is not None:
        return load.run(_measure(config, progress, say))
    config = replace(config, model=config.model or DEFAULT_MODEL)
    assert config.model is not None
    with running_server(config.model, config.server_flags) as url:
        return load.run(_measure(config.at_url(url), progress, say))


async def _measure(
    config: ServeBenchConfig, progress: Progress | None, say: Callable[[str], None]
) -> ServeResult:
    target = config.target
    patience = Patience.of(target.ready_check_timeout_sec, say)
    client = _create_client(config)
    try:
        await wait_until_listening(client, patience)
        model_name = target.model_name or await served_model(client, config.model)
        tokenizer_id = target.tokenizer or config.model or _installed(model_name)
        tokenizer = _load_tokenizer(tokenizer_id) if tokenizer_id else None
        requests = create_requests(config.workload, tokenizer)
        endpoint = Endpoint(
            client,
            model_name,
            target.backend,
            target.path,
            config.workload.fields,
            target.request_timeout,
        )
        if tokenizer is not None and (endpoint.is_chat or target.prompt_format == "text"):
            requests = [as_text(request, tokenizer) for request in requests]
        plan = create_plan(config.load, requests, config.workload.seed)
        await _warm_up(config, endpoint, requests, patience)
        with Recorder(_shown_settings(config), owns_work=False) as recorder:
            result = await send_load(endpoint, requests, plan, _counter(len(requests), progress))
    finally:
        await client.close()
    if tokenizer is not None:
        count_tokens(result.records, tokenizer)
    return ServeResult(
        report=create_report(
            result.records,
            is_open_loop=plan.is_open_loop,
            percents=config.report.percents,
            slo=RequestSlo.from_texts(config.report.goodput),
            steady_share=config.report.steady_state_share,
            seed=config.workload.seed,
        ),
        summary=ServeSummary(
            backend=target.backend,
            model_id=model_name,
            tokenizer_id=tokenizer_id,
            num_prompts=len(requests),
            request_rate=config.load.request_rate,
            burstiness=config.load.burstiness,
            max_concurrency=config.load.max_concurrency,
            ramp_up=config.load.ramp_up,
            label=config.report.label,
            metadata=key_values("metadata", config.report.metadata),
            date=recorder.started.astimezone(),
        ),
        run=recorder.as_json(),
        config=config,
        is_interrupted=result.is_interrupted,
    )


def _create_client(config: ServeBenchConfig) -> HttpClient:
    target = config.target
    headers = target.headers
    if "Authorization" not in headers and (key := os.environ.get("OPENAI_API_KEY")):
        headers["Authorization"] = f"Bearer {key}"
    assert target.base_url is not None
    has_version = target.path.startswith("/v1/")
    url = server_url(target.base_url) if has_version else target.base_url
    try:
        return HttpClient(url, headers=headers, verify=not target.insecure)
    except ValueError as error:
        raise ConfigError(f"base_url: {error}") from error


def as_text(request: WorkloadRequest, tokenizer: Tokenizer) -> WorkloadRequest:
    """Convert token ids to text, which the server may tokenize differently: it counts them."""
    if request.prompt_token_ids is None:
        return request
    text = tokenizer.decode(request.prompt_token_ids)
    return replace(request, prompt=text, prompt_token_ids=None)


def count_tokens(records: Sequence[RequestRecord], tokenizer: Tokenizer) -> None:
    """Count the tokens of answers that the server did not count, by the tokenizer."""
    for record in records:
        if record.completed and record.output_tokens_from == "events" and record.text:
            record.output_tokens = len(tokenizer.encode(record.text))
            record.output_tokens_from = "tokenizer"


async def _warm_up(
    config: ServeBenchConfig,
    endpoint: Endpoint,
    requests: Sequence[WorkloadRequest],
    patience: Patience,
) -> None:
    """Send prompts of the workload, reversed: no prefix of a measured prompt gets cached."""
    target = config.target
    if not requests:
        return
    if target.ready_check_timeout_sec != 0:
        await wait_until_ready(endpoint, _backwards(requests[0]), patience)
    if target.num_warmups:
        chosen = [_backwards(requests[i % len(requests)]) for i in range(target.num_warmups)]
        places = config.load.max_concurrency or target.num_warmups
        result = await send_load(endpoint, chosen, LoadPlan(None, places))
        if result.is_interrupted:
            raise asyncio.CancelledError


def _backwards(request: WorkloadRequest) -> WorkloadRequest:
    if request.prompt_token_ids is not None:
        return replace(request, prompt_token_ids=request.prompt_token_ids[::-1])
    if request.prompt is not None:
        return replace(request, prompt=" ".join(reversed(request.prompt.split(" "))))
    return request


def _counter(total: int, progress: Progress | None) -> Callable[[RequestRecord], None]:
    ended = 0

    def count(record: RequestRecord) -> None:
        nonlocal ended
        ended += 1
        if progress is not None:
            progress(ended, total)

    return count


def _installed(name: str) -> str | None:
    """Return ``name``, if a model of this name is here: nothing is fetched."""
    from octavo.hub import store

    return name if store.find(name) is not None else None


def _load_tokenizer(name: str) -> Tokenizer:
    from octavo.sources.open import load_tokenizer

    return load_tokenizer(hub.resolve(name))


def _shown_settings(config: ServeBenchConfig) -> dict[str, Any]:
    """Return the settings that a result tells: without keys, and as JSON has it."""
    settings: dict[str, Any] = asdict(config)
    settings["target"]["api_key"] = None if config.target.api_key is None else "(given)"
    settings["target"]["header"] = [*key_values("header", config.target.header)]
    return {name: _as_json(value) for name, value in settings.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
