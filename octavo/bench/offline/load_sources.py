"""The engine in this process, or the server, that a sweep puts under load."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from octavo.base.errors import BenchmarkError
from octavo.bench.offline.closed_loop import run_closed_loop
from octavo.bench.offline.session import OfflineSession
from octavo.bench.offline.sweep import LoadSample, SweepPlan
from octavo.bench.serving import load
from octavo.bench.serving.endpoint import Endpoint, Patience, served_model, wait_until_ready
from octavo.bench.serving.http_client import HttpClient
from octavo.bench.serving.load import LoadResult, send_load
from octavo.measure.request_record import RequestRecord
from octavo.workload.datasets import random_requests
from octavo.workload.plan import LoadPlan

T = TypeVar("T")


class EngineUnderLoad:
    """An engine in this process."""

    def __init__(self, session: OfflineSession):
        self._session = session
        self._avoid = session.loaded.text_engine.eos_token_ids

    def warm_up(self, plan: SweepPlan) -> None:
        """Run one request, which also checks that such requests can be served at all."""
        requests = random_requests(
            1, self._session.vocab_size, plan.input_len, plan.output_len, seed=-1
        )
        self._session.run(requests)

    def measure(self, plan: SweepPlan, concurrency: int, repetition: int) -> LoadSample:
        requests = plan.requests(concurrency, repetition, self._session.vocab_size, self._avoid)
        timing = run_closed_loop(
            self._session,
            requests,
            concurrency,
            num_ramp=concurrency,
            num_measured=plan.num_measured(concurrency),
        )
        return LoadSample(
            concurrency,
            timing.elapsed_s,
            len(timing.requests),
            timing.num_prompt_tokens,
            timing.num_output_tokens,
            timing.latencies,
            timing.mean_batch,
            timing.num_preemptions,
        )


class ServerUnderLoad:
    """A server that speaks OpenAI's protocol, measured by the clock of the client.

    Args:
        create_client: makes a client of the server, for one event loop.
        model: as the server calls it; None asks the server.
        vocab_size: of the served model: prompts are made of its token ids.
    """

    def __init__(self, create_client: Callable[[], HttpClient], model: str | None, vocab_size: int):
        self._create_client = create_client
        self._model = model
        self._vocab_size = vocab_size

    def warm_up(self, plan: SweepPlan) -> None:
        """Send one request. Raises ServerError if the server is not there, or refuses it."""
        requests = random_requests(
            1, self._vocab_size, plan.input_len, plan.output_len, seed=plan.seed - 1
        )

        async def ask(endpoint: Endpoint) -> None:
            await wait_until_ready(endpoint, requests[0], Patience(0, 0))

        load.run(self._with_endpoint(ask))

    def measure(self, plan: SweepPlan, concurrency: int, repetition: int) -> LoadSample:
        requests = plan.requests(concurrency, repetition, self._vocab_size)

        async def send(endpoint: Endpoint) -> LoadResult:
            return await send_load(endpoint, requests, LoadPlan(None, max_concurrency=concurrency))

        result = load.run(self._with_endpoint(send))
        if result.is_interrupted:
            raise KeyboardInterrupt
        return sample_of_records(result.records, concurrency)

    async def _with_endpoint(self, use: Callable[[Endpoint], Coroutine[Any, Any, T]]) -> T:
        client = self._create_client()
        try:
            if self._model is None:
                self._model = await served_model(client)
            return await use(Endpoint(client, self._model, fields={"ignore_eos": True}))
        finally:
            await client.close()


def sample_of_records(records: Sequence[RequestRecord], concurrency: int) -> LoadSample:
    """Return a sample of a closed loop, from its records, over the time in which it was full.

    The ramp is the first ``concurrency`` records; the window opens when all of it have had a token
    and closes when the last request is sent, after which the loop runs empty.

    Raises:
        BenchmarkError: a request failed, or none was both sent and answered in the window.
    """
    for record in records:
        if not record.completed:
            raise BenchmarkError(f"request {record.request_id} failed: {record.error}")
    opened = max(record.first_token or 0.0 for record in records[:concurrency])
    closed = max(record.sent for record in records)
    measured = [each for each in records if each.sent >= opened and each.ended <= closed]
    if not measured:
        raise BenchmarkError(
            f"no request began and ended while {concurrency} were in flight: ask for more waves"
        )
    num_output_tokens = sum(
        tokens
        for record in records
        for time, tokens in zip(record.event_times, record.tokens_of_events(), strict=True)
        if opened < time <= closed
    )
    num_prompt_tokens = sum(
        record.prompt_tokens or 0
        for record in records
        if opened < (record.first_token or 0.0) <= closed
    )
    return LoadSample(
        concurrency,
        closed - opened,
        len(measured),
        num_prompt_tokens,
        num_output_tokens,
        {
            "ttft": [each.ttft for each in measured],
            "tpot": [each.tpot for each in measured if each.tpot is not None],
            "itl": [gap for each in measured for gap in each.itls],
            "e2e": [each.e2el for each in measured],
        },
    )
