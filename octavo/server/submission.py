"""From a prompt and what to do with it to a generation under way, on its tenant's account."""

from __future__ import annotations

import secrets
import uuid
from types import TracebackType

from starlette.requests import Request

from octavo.core.sampling_params import SamplingParams
from octavo.errors import EngineError
from octavo.server.context import request_context
from octavo.server.generation import Completion, Delta, Generation, GenerationRequest
from octavo.server.http_errors import model_not_found
from octavo.server.service import Service
from octavo.server.sse import run_until_disconnect
from octavo.server.tenants import Tenant


def check_model(service: Service, name: str | None) -> None:
    """No name is the served model's.

    Raises:
        HttpError: 404, the name is another model's.
    """
    if name is not None and name not in service.model_names:
        raise model_not_found(name)


class Submission:
    """A generation, and the tokens that its tenant was charged for it.

    It must be closed, by ``close`` or by leaving a ``with`` block: what was not used is then given
    back, and the generation ends wherever it stands.
    """

    def __init__(self, generation: Generation, tenant: Tenant):
        self.generation = generation
        self._tenant = tenant
        self._is_closed = False

    @property
    def num_pending_chars(self) -> int:
        return self.generation.num_pending_chars

    def close(self) -> None:
        """May be repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self.generation.close()
        request, stats = self.generation.request, self.generation.stats
        prompts = request.params.num_samples * stats.num_prompt_tokens
        self._tenant.refund_tokens(max(0, request.cost - prompts - stats.num_output_tokens))

    def __enter__(self) -> Generation:
        return self.generation

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def submit(
    service: Service,
    request: Request,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    streams: bool,
    timeout: float | None = None,
) -> Submission:
    """Charge the tenant for a request, and queue it.

    Args:
        params: without ``max_tokens``, the answer may fill the context; without ``seed``, one is
            drawn here, so that an engine that is restarted would give the same answer again.
        timeout: seconds from the arrival of the request; the server's own if not given.

    Raises:
        RateLimitError: the tenant has no tokens left for it.
        RequestError, EngineError: as `EngineClient.submit` does.
    """
    context = request_context(request)
    is_deterministic = params.temperature == 0 or params.seed is not None
    if params.seed is None:
        params = params.with_changes(seed=secrets.randbits(63))
    facts = service.engine.facts
    # The last token is sampled and never computed, so it needs no place in the pool.
    longest = min(facts.max_model_len, facts.num_blocks * facts.block_size + 1)
    room = longest - len(prompt_token_ids)
    if params.max_tokens is None and room > 0:
        params = params.with_changes(max_tokens=room)
    timeout = timeout or service.settings.request_timeout
    asked = GenerationRequest(
        uuid.uuid4().hex,
        prompt_token_ids,
        params,
        context.arrival_time,
        cache_salt=context.tenant.salt,
        deadline=None if timeout is None else context.arrival_time + timeout,
        streams=streams,
        is_deterministic=is_deterministic,
        external_id=context.external_id,
        route=request.scope["path"],
        tenant=context.tenant.name,
    )
    context.tenant.charge_tokens(asked.cost)
    try:
        generation = service.engine.submit(asked)
    except BaseException:
        context.tenant.refund_tokens(asked.cost)
        raise
    return Submission(generation, context.tenant)


async def collect(submission: Submission, request: Request) -> list[Completion]:
    """All completions of a submission, which is closed then, or as soon as the client is gone.

    Raises:
        EngineError: a sample could not be computed.
    """
    with submission as generation:
        completions = await run_until_disconnect(request, generation.collect())
    for completion in completions:
        check_sample(completion)
    return completions


def check_sample(sample: Completion | Delta) -> None:
    """Raises EngineError if a sample ended by neither a stop nor its length."""
    if sample.finish_reason in ("error", "abort"):
        raise EngineError(sample.error or "the request was ended by the engine")
