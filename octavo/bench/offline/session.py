"""A session that runs workloads on an engine in this process, and times its steps from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.base.errors import BenchmarkError, QueueFullError
from octavo.core.sampling_params import SamplingParams
from octavo.cost.loaded_model import live_rank_model
from octavo.cost.rank_model import RankModel
from octavo.cost.work import Span
from octavo.settings.engine import EngineArgs
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.core.batch import Batch
    from octavo.core.engine import EngineStep
    from octavo.core.executor import Probe
    from octavo.core.stats import RequestStats
    from octavo.serving.text_engine import PreparedMask, SampleGroup
    from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step: its batch's size, its wall time, and that part of it that the kernels' call took.

    ``num_multi_steps``: tokens that the step brought to the request that got most of them, one
    after the other; 1 where drafts were verified. ``num_new_tokens``: that it brought to all.
    ``kv_utilisation``: share of the KV blocks that requests held at its end.
    """

    num_seqs: int
    num_tokens: int
    is_pure_decode: bool
    num_multi_steps: int
    wall_s: float
    kernel_s: float
    kv_utilisation: float = 0.0
    chunks: tuple[Span, ...] = ()
    num_new_tokens: int = 0

    @property
    def overhead_s(self) -> float:
        """Wall time outside of the kernels, for one token of each request."""
        return (self.wall_s - self.kernel_s) / max(1, self.num_multi_steps)


@dataclass(slots=True)
class RunTiming:
    """Timings of a run of requests. ``elapsed_s``: from the first arrival to the last token."""

    elapsed_s: float
    requests: list[RequestStats]
    output_token_ids: list[list[int]]
    steps: list[StepTiming] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(stats.num_prompt_tokens for stats in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(stats.num_output_tokens for stats in self.requests)

    @property
    def num_preemptions(self) -> int:
        return sum(stats.num_preemptions for stats in self.requests)


def latencies(requests: Sequence[RequestStats]) -> dict[str, list[float]]:
    """Return seconds by the name of the latency, of each request that has it."""
    found = {name: [getattr(stats, name) for stats in requests] for name in ("ttft", "tpot", "e2e")}
    return {name: [each for each in values if each is not None] for name, values in found.items()}


class OfflineSession:
    """A loaded engine that runs workloads one after the other.

    Raises:
        ModelError: the model cannot be found or read. ConfigError: a setting does not fit.
    """

    def __init__(self, args: EngineArgs, progress: Callable[[int, int], None] | None = None):
        from octavo.serving.load import load_engine

        self.args = args
        self.loaded = load_engine(args, progress)
        self._text_engine = self.loaded.text_engine
        self._count = 0

    @property
    def vocab_size(self) -> int:
        return self._text_engine.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text_engine.tokenizer

    @property
    def probe(self) -> Probe:
        """Facts that the executor tells of itself. A reference to it would keep the memory of a
        closed engine."""
        return self._text_engine.engine.executor.probe()

    @property
    def draft_seconds(self) -> float:
        """Seconds spent in drafting so far."""
        proposer = self._text_engine.engine.scheduler.proposer
        return 0.0 if proposer is None else proposer.seconds

    @property
    def rank_model(self) -> RankModel:
        """The weights and the KV cache as they lie in memory, for counting what steps do."""
        probe = self.probe
        num_ranks = self.loaded.ranks.spec.num_ranks
        return live_rank_model(
            self.loaded.model_config, probe.matrices(), probe.kv_bytes_per_token, num_ranks
        )

    @property
    def info(self) -> dict[str, Any]:
        """Description of the engine in results: device, kernels, resolved settings, choices."""
        config = self.loaded.config
        return {
            **self.loaded.info,
            "model": config.model,
            "kv_dtype": config.cache.dtype,
            "prefix_caching": config.cache.enable_prefix_caching,
            "batching": config.batching,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
            "max_model_len": config.scheduler.max_model_len,
            "chunked_prefill": config.scheduler.enable_chunked_prefill,
            "choices": list(config.choices),
        }

    def run(
        self,
        requests: Sequence[WorkloadRequest],
        observe: Callable[[Batch], None] | None = None,
        *,
        cache_salt: str = "",
        ask: Callable[[WorkloadRequest], SamplingParams] | None = None,
        mask_of: Callable[[WorkloadRequest], PreparedMask] | None = None,
    ) -> RunTiming:
        """Give all requests at once, and run until the last has ended.

        Decoding is greedy. A request with ``output_len`` generates exactly so many tokens, whatever
        they are; without, it ends where the model ends it.

        Args:
            observe: called with every batch after its step, outside of the step's time.
            cache_salt: requests share prefixes only with those of the same salt.
            ask: returns the sampling parameters of a request, in place of these.
            mask_of: returns the mask of a request, see ``prepare_mask``.

        Raises:
            BenchmarkError: a request failed.
            RequestError: a request cannot be served.
        """
        engine = self._text_engine
        probe = self.probe
        groups: list[SampleGroup] = []
        steps: list[tuple[EngineStep, float, float]] = []

        def step() -> None:
            kernels_before, begin = probe.kernel_seconds, time.perf_counter()
            _, done = engine.step()
            wall_s = time.perf_counter() - begin
            if done is not None:
                steps.append((done, wall_s, probe.kernel_seconds - kernels_before))
                if observe is not None:
                    observe(done.batch)

        # Tokenized before the clock starts: that is no work of the engine.
        prepared = [(request, self.token_ids(request)) for request in requests]
        begin = time.perf_counter()
        try:
            for request, token_ids in prepared:
                params = (ask or sampling_params)(request)
                mask = None if mask_of is None else mask_of(request)
                groups.append(self._add(token_ids, params, cache_salt, mask, step))
            while engine.has_unfinished_requests:
                step()
        except BaseException:
            for group in groups:
                engine.abort(group.request_id)
            raise
        elapsed = time.perf_counter() - begin
        return _collect(elapsed, groups, [_timing(*timed) for timed in steps])

    def prepare_mask(self, params: SamplingParams) -> PreparedMask:
        """Return the mask of ``params``; see `TextEngine.prepare_mask`."""
        return self._text_engine.prepare_mask(params)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._text_engine.eos_token_ids

    def close(self) -> None:
        self._text_engine.engine.close()

    def __enter__(self) -> OfflineSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def token_ids(self, request: WorkloadRequest) -> list[int]:
        """Return the tokens of the prompt, with those that the tokenizer or the chat
        template adds."""
        if request.prompt_token_ids is not None:
            return list(request.prompt_token_ids)
        if request.messages is not None:
            return self._text_engine.tokenizer.chat_prompt(list(request.messages)).token_ids
        assert request.prompt is not None
        return self._text_engine.tokenizer.encode(request.prompt)

    def _add(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache_salt: str,
        mask: PreparedMask | None,
        step: Callable[[], None],
    ) -> SampleGroup:
        self._count += 1
        while True:
            try:
                return self._text_engine.add(
                    f"bench-{self._count}",
                    None,
                    token_ids,
                    params,
                    cache_salt=cache_salt,
                    prepared_mask=mask,
                )
            except QueueFullError:
                if not self._text_engine.has_unfinished_requests:
                    raise
                step()


def sampling_params(request: WorkloadRequest) -> SamplingParams:
    """Return greedy parameters, with exactly ``output_len`` tokens where that is given."""
    return SamplingParams(
        temperature=0,
        max_tokens=request.output_len,
        ignore_eos=request.output_len is not None,
        detokenize=False,
    )


def _timing(done: EngineStep, wall_s: float, kernel_s: float) -> StepTiming:
    batch = done.batch
    new_tokens = {update.request.request_id: len(update.new_token_ids) for update in done.updates}
    has_drafts = any(item.draft is not None for item in batch.items)
    return StepTiming(
        batch.num_seqs,
        batch.num_tokens,
        batch.is_pure_decode,
        1 if has_drafts else max(new_tokens.values(), default=0),
        wall_s,
        kernel_s,
        done.stats.kv_utilisation,
        tuple(
            Span(
                item.start,
                item.num_tokens,
                # The request has moved on: the number of sampled tokens is known from its update.
                new_tokens.get(item.request.request_id, 0),
                None if item.draft is None else range(len(item.draft)),
            )
            for item in batch.items
        ),
        sum(new_tokens.values()),
    )


def _collect(elapsed: float, groups: Sequence[SampleGroup], steps: list[StepTiming]) -> RunTiming:
    samples = [group.samples[0].request for group in groups]
    for group, sample in zip(groups, samples, strict=True):
        if sample.error is not None:
            raise BenchmarkError(f"request {group.request_id} failed: {sample.error}")
    return RunTiming(
        elapsed,
        [sample.stats for sample in samples],
        [list(sample.output_token_ids) for sample in samples],
        steps,
    )
