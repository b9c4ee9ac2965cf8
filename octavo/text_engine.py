"""Prompts in, text out: the engine with a tokenizer around it.

Used by `LLM` (which calls `step` in a loop) and by `AsyncLLM` (which does so in a thread). Here a
prompt becomes one request for each of its samples, tokens become text, and stop strings end them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.core.engine import Engine, EngineStep
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import RequestUpdate
from octavo.errors import InvalidRequestError
from octavo.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

_log = logging.getLogger("octavo")

# A string, token ids, or a mapping with "prompt" or "prompt_token_ids".
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(slots=True)
class Sample:
    """One completion under way."""

    index: int
    request: Request
    detokenizer: IncrementalDetokenizer | None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    @property
    def text(self) -> str:
        return self.detokenizer.text if self.detokenizer else ""


@dataclass(slots=True)
class Generation:
    """One prompt with its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[Sample]
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(sample.request.is_finished for sample in self.samples)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a step added to one sample."""

    generation: Generation
    sample: Sample
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # of the tokens, if they were asked for
    prompt_logprobs: list[TokenLogprobs]


class TextEngine:
    """Generations over one engine. Not thread-safe, like the engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        seed: int = 0,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.generations: dict[str, Generation] = {}
        self._samples: dict[str, tuple[Generation, Sample]] = {}
        self._seeds = random.Random(seed)

    @property
    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests

    # -- in ----------------------------------------------------------------------------------

    def tokenize(
        self, prompt: Prompt, *, parse_special: bool = False
    ) -> tuple[str | None, list[int]]:
        """The text (None if ids were given) and token ids of a prompt in any accepted form."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), checked_token_ids(
                    prompt["prompt_token_ids"], self.vocab_size
                )
            prompt = prompt.get("prompt", "")
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, parse_special=parse_special)
        return None, checked_token_ids(prompt, self.vocab_size)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float | None = None,
    ) -> Generation:
        """Queue a prompt, or refuse it: a ``RequestError`` leaves nothing behind.

        ``arrival_time``: on the engine's clock; None is now.
        """
        check_vocabulary(params, self.vocab_size)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        bad_words = self._bad_words(params)
        now = self.engine.clock.now() if arrival_time is None else arrival_time
        generation = Generation(request_id, prompt, prompt_token_ids, params, [])
        leader: Request | None = None
        for index in range(params.num_samples):
            request = Request(
                request_id if params.num_samples == 1 else f"{request_id}#{index}",
                prompt_token_ids,
                _params_of_sample(params, index),
                now,
                priority=priority,
                seed=seed,
                sample_index=index,
                eos_token_ids=self.eos_token_ids,
                bad_words_token_ids=bad_words,
                cache_salt=cache_salt,
                fork_of=leader,
            )
            try:
                self.engine.add(request)
            except Exception:
                self._withdraw(generation)
                raise
            leader = leader or request
            sample = Sample(index, request, self._detokenizer(params, prompt_token_ids))
            generation.samples.append(sample)
            self._samples[request.request_id] = (generation, sample)
        if params.prompt_logprobs is not None:
            generation.prompt_logprobs.append(None)  # nothing comes before the first token
        self.generations[request_id] = generation
        return generation

    def abort(self, request_id: str) -> Generation | None:
        """End a generation at any moment. Unknown and ended ids are no error."""
        generation = self.generations.pop(request_id, None)
        if generation is not None:
            self._withdraw(generation)
        return generation

    def _withdraw(self, generation: Generation) -> None:
        for sample in generation.samples:
            self.engine.abort(sample.request.request_id)
            self._samples.pop(sample.request.request_id, None)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Bad words as tokens, at the start of a text and after a space."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids:
                    words[tuple(ids)] = None
        return tuple(words)

    def _detokenizer(
        self, params: SamplingParams, prompt_token_ids: list[int]
    ) -> IncrementalDetokenizer | None:
        if not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            prompt_token_ids=prompt_token_ids,
        )

    # -- out ---------------------------------------------------------------------------------

    def step(self) -> tuple[list[TextDelta], EngineStep | None]:
        """Run one engine step; what it added, sample by sample.

        A generation whose samples have all ended is forgotten; its deltas still refer to it.
        """
        step = self.engine.step()
        deltas = [self._advance_or_fail(update) for update in step.updates] if step else []
        for delta in deltas:
            if delta.generation.is_finished:
                self.generations.pop(delta.generation.request_id, None)
        return deltas, step

    def _advance_or_fail(self, update: RequestUpdate) -> TextDelta:
        """A request whose text cannot be made ends, and no other."""
        generation, sample = self._samples[update.request.request_id]
        try:
            delta = self._advance(generation, sample, update)
        except Exception as error:
            request = update.request
            _log.exception("the text of request %s failed", request.request_id)
            self.engine.fail(request, f"{type(error).__name__}: {error}")
            delta = TextDelta(generation, sample, "", [], [], [])
        if update.request.is_finished:
            del self._samples[update.request.request_id]
        return delta

    def _advance(self, generation: Generation, sample: Sample, update: RequestUpdate) -> TextDelta:
        for entry in update.prompt_logprobs:
            generation.prompt_logprobs.append(self._logprobs(entry))
        asked = generation.params.logprobs is not None
        for entry in update.logprobs:
            sample.cumulative_logprob += entry.logprob
            if asked:
                sample.logprobs.append(self._logprobs(entry))
        text = self._detokenize(sample, update.new_token_ids)
        logprobs = update.logprobs if asked else []
        return TextDelta(
            generation, sample, text, update.new_token_ids, logprobs, update.prompt_logprobs
        )

    def _detokenize(self, sample: Sample, token_ids: list[int]) -> str:
        """The text that new tokens add. Ends the request if it completes a stop string."""
        detokenizer, request = sample.detokenizer, sample.request
        if detokenizer is None:
            return ""
        if (
            token_ids
            and request.finish_reason is FinishReason.STOP
            and not request.params.include_stop_str_in_output
        ):
            token_ids = token_ids[:-1]  # the token that stopped it says nothing to the reader
        text = detokenizer.push(token_ids)
        if detokenizer.stop_reason is not None:
            if request.is_finished:  # it reached its length with the same token
                request.finish_reason = FinishReason.STOP
                request.stop_reason = detokenizer.stop_reason
            else:
                self.engine.finish(request.request_id, detokenizer.stop_reason)
        elif request.is_finished:
            text += detokenizer.finish()
        return text

    def _logprobs(self, entry: TokenLogprobs) -> PositionLogprobs:
        position = {
            token_id: Logprob(logprob, rank, self.tokenizer.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        }
        own = Logprob(entry.logprob, entry.rank, self.tokenizer.token_text(entry.token_id))
        return {entry.token_id: own, **position} | {entry.token_id: own}

    def output(self, generation: Generation) -> RequestOutput:
        """The whole generation as it stands."""
        samples = generation.samples
        if generation.params.num_samples > generation.params.n and generation.is_finished:
            best = sorted(samples, key=lambda sample: -sample.cumulative_logprob)
            samples = best[: generation.params.n]
        errors = [sample.request.error for sample in samples if sample.request.error]
        return RequestOutput(
            generation.request_id,
            generation.prompt,
            generation.prompt_token_ids,
            [_completion(generation, sample, rank) for rank, sample in enumerate(samples)],
            generation.is_finished,
            metrics_of(generation),
            generation.prompt_logprobs if generation.params.prompt_logprobs is not None else None,
            errors[0] if errors else None,
        )


def checked_token_ids(
    token_ids: Any, vocab_size: int, field: str = "prompt_token_ids"
) -> list[int]:
    """The ids of a prompt as a list; InvalidRequestError names the first that is none."""
    ids = list(token_ids)
    for position, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError(
                f"must be integers; position {position} holds {token_id!r}", field
            )
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{token_id} at position {position} is outside the vocabulary "
                f"of {vocab_size} tokens",
                field,
            )
    return ids


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError if parameters name a token that the model does not have."""
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{token_id} is outside the vocabulary of {vocab_size} tokens", name
                )


def _params_of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """What differs between the samples of a prompt."""
    changes: dict[str, Any] = {}
    if index > 0 and params.prompt_logprobs is not None:
        changes["prompt_logprobs"] = None  # they are the same for all
    if params.num_samples > params.n and params.logprobs is None:
        changes["logprobs"] = 0  # by which the best are chosen
    return params.with_changes(**changes) if changes else params


def _completion(generation: Generation, sample: Sample, index: int) -> CompletionOutput:
    wants_logprobs = generation.params.logprobs is not None
    request = sample.request
    return CompletionOutput(
        index=index,
        text=sample.text,
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason.value if request.finish_reason else None,
        stop_reason=request.stop_reason,
        cumulative_logprob=sample.cumulative_logprob if wants_logprobs else None,
        logprobs=sample.logprobs if wants_logprobs else None,
    )


def metrics_of(generation: Generation) -> RequestMetrics:
    """Of a single sample, its own; of several, from the first token of any to the last of all."""
    stats = [sample.request.stats for sample in generation.samples]
    first = stats[0]
    if len(stats) == 1:
        e2e, tpot, decode_tps = first.e2e, first.tpot, first.decode_tps
    else:
        ends = [one.e2e for one in stats if one.e2e is not None]
        tpots = [one.tpot for one in stats if one.tpot is not None]
        e2e = max(ends, default=None)
        tpot = sum(tpots) / len(tpots) if tpots else None
        after_first = sum(max(0, one.num_output_tokens - 1) for one in stats)
        span = e2e - first.ttft if e2e is not None and first.ttft is not None else 0.0
        decode_tps = after_first / span if span > 0 else None
    return RequestMetrics(
        queue_time=first.queue_time,
        ttft=first.ttft,
        tpot=tpot,
        e2e=e2e,
        prefill_tps=first.prefill_tps,
        decode_tps=decode_tps,
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=sum(one.num_preemptions for one in stats),
    )
