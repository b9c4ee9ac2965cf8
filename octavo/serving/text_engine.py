"""The engine with a tokenizer around it, which takes prompts and gives text.

A prompt becomes one request for each of its samples, tokens become text, and stop strings end
requests. `EngineLoop` (loop.py) is the loop around it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.base.errors import ENDINGS, InvalidRequestError
from octavo.core.engine import Engine, EngineStep
from octavo.core.limits import check_vocabulary, checked_token_ids
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams, check_prompt_logprobs
from octavo.core.scheduler import RequestUpdate
from octavo.core.stats import DraftStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.core.token_mask import TokenMask, create_mask
from octavo.grammars.compiler import GrammarCompiler
from octavo.grammars.trial import TrialProcess
from octavo.serving.chat_templates import ChatTemplates
from octavo.serving.outputs import Delta, RequestMetrics
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

_log = logging.getLogger("octavo")

# A string, token ids, or a mapping with "prompt" or "prompt_token_ids".
Prompt = str | Sequence[int] | Mapping[str, Any]
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


def cache_salt_of(prompt: Prompt) -> str:
    """Return the salt of a prompt: it shares cached blocks only with prompts of the same salt."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequestError(f"must be a text, not {salt!r}", "cache_salt")
    return salt or ""


class PreparedMask(NamedTuple):
    """The tokens that a request may generate, at its beginning; None if it may generate any."""

    mask: TokenMask | None


@dataclass(slots=True)
class TextSample:
    """One completion under way."""

    index: int
    request: Request
    detokenizer: IncrementalDetokenizer | None
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputSoFar:
    """The output of a sample in an engine that ended, from which another engine goes on."""

    index: int
    token_ids: Sequence[int]
    cumulative_logprob: float = 0.0


@dataclass(slots=True)
class SampleGroup:
    """One prompt with its samples: all of them, or those that go on from another engine."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[TextSample] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(sample.request.is_finished for sample in self.samples)

    def sample(self, index: int) -> TextSample:
        """Return the sample of this index."""
        if len(self.samples) == self.params.num_samples:
            return self.samples[index]
        return next(sample for sample in self.samples if sample.index == index)


class TextEngine:
    """Prompts and their samples over one engine. Not thread-safe, like the engine."""

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
        self.grammars = GrammarCompiler(
            tokenizer, vocab_size, self.eos_token_ids, engine.constraints, TrialProcess()
        )
        self.chat_templates = ChatTemplates(tokenizer)
        self.groups: dict[str, SampleGroup] = {}
        self._samples: dict[str, tuple[SampleGroup, TextSample]] = {}
        self._seeds = random.Random(seed)

    @property
    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests

    # -- in ----------------------------------------------------------------------------------

    def tokenize(
        self, prompt: Prompt, *, parse_special: bool = False
    ) -> tuple[str | None, list[int]]:
        """Return the text (None if ids were given) and token ids of a prompt in any accepted form.

        Its ``cache_salt`` is for ``add``: see ``cache_salt_of``.
        """
        if isinstance(prompt, Mapping):
            for name, value in prompt.items():
                if name not in _PROMPT_FIELDS and value is not None:
                    raise InvalidRequestError(
                        f"has {name!r}, which is not supported: {', '.join(_PROMPT_FIELDS)} are",
                        "prompt",
                    )
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), checked_token_ids(
                    prompt["prompt_token_ids"], self.vocab_size
                )
            prompt = prompt.get("prompt", "")
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, parse_special=parse_special)
        if not isinstance(prompt, Iterable):
            raise InvalidRequestError(
                f"must be a text, integers that are token ids, or a mapping, not {prompt!r}",
                "prompt",
            )
        return None, checked_token_ids(prompt, self.vocab_size)

    @staticmethod
    def takes_long_to_prepare(params: SamplingParams) -> bool:
        """Tell whether the mask of ``params`` takes longer than a step may wait."""
        return params.structured_outputs is not None or params.thinking_token_budget is not None

    def prepare_mask(
        self,
        params: SamplingParams,
        bad_words_token_ids: Sequence[Sequence[int]] | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> PreparedMask:
        """Return the mask of ``params``. Any thread may call it, and it may take a second.

        Args:
            prompt_token_ids: of the prompt, which may end within a thought.
            bad_words_token_ids: what ``Tokenizer.encode_words`` makes of ``params.bad_words``, if
                it is known already.

        Raises:
            InvalidRequestError: ``params`` ask for a grammar that cannot be; see `GrammarCompiler`.
        """
        if bad_words_token_ids is None:
            bad_words_token_ids = self.tokenizer.encode_words(params.bad_words)
        asked = params.structured_outputs
        grammar = None if asked is None else self.grammars.mask(StructuredOutputs.of(asked))
        budget, thought = params.thinking_token_budget, None
        if budget is not None:
            thought = self.chat_templates.thought_budget(
                budget, prompt_token_ids, self.vocab_size, params.thought_texts
            )
        stop_token_ids = (*self.eos_token_ids, *params.stop_token_ids)
        return PreparedMask(
            create_mask(
                params, self.vocab_size, stop_token_ids, bad_words_token_ids, grammar, thought
            )
        )

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        weight: float = 1.0,
        isolated: bool = False,
        arrival_time: float | None = None,
        prepared_mask: PreparedMask | None = None,
        resumed: Sequence[OutputSoFar] = (),
    ) -> SampleGroup:
        """Queue a prompt, or refuse it: a ``RequestError`` leaves nothing behind.

        Args:
            tenant, weight: who asks, and of which share; see ``core/fair_queue.py``.
            arrival_time: on the engine's clock; None is now.
            prepared_mask: what ``prepare_mask`` makes of ``params``. None has it made here: not for
                those whose engine serves others meanwhile.
            resumed: the samples that have not ended, of a prompt that another engine was at work
                on. They go on as after a preemption: all their tokens are computed again, and
                further ones are those that would have come there, since draws, penalties and limits
                count the output.
        """
        if request_id in self.groups:
            raise InvalidRequestError(f"{request_id!r} is in use", "request_id")
        params = params.clone()  # the caller may change its own object
        check_vocabulary(params, self.vocab_size)
        check_prompt_logprobs(params, len(prompt_token_ids))
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        mask = (prepared_mask or self.prepare_mask(params, prompt_token_ids=prompt_token_ids)).mask
        now = self.engine.clock.now() if arrival_time is None else arrival_time
        group = SampleGroup(request_id, prompt, prompt_token_ids, params)
        leader: Request | None = None
        for before in resumed or [OutputSoFar(index, ()) for index in range(params.num_samples)]:
            index = before.index
            request = Request(
                request_id if params.num_samples == 1 else f"{request_id}#{index}",
                prompt_token_ids,
                _params_of_sample(params, index),
                now,
                priority=priority,
                seed=seed,
                sample_index=index,
                eos_token_ids=self.eos_token_ids,
                mask=mask.fork() if mask is not None else None,
                cache_salt=cache_salt,
                tenant=tenant,
                weight=weight,
                isolated=isolated,
                fork_of=leader,
            )
            try:
                sample = TextSample(index, request, self._detokenizer(params, prompt_token_ids))
                if resumed:
                    _go_on(sample, before)
                self.engine.add(request)
            except BaseException:
                self._withdraw(group)
                raise
            leader = leader or (None if resumed else request)
            group.samples.append(sample)
            self._samples[request.request_id] = (group, sample)
        self.groups[request_id] = group
        return group

    def abort(self, request_id: str) -> list[Delta]:
        """End a prompt and all its samples at any moment; returns the last delta of each that still
        ran.

        Unknown and ended ids are no error.
        """
        group = self.groups.pop(request_id, None)
        if group is None:
            return []
        running = [sample for sample in group.samples if not sample.request.is_finished]
        self._withdraw(group)
        return [_ending(group, sample) for sample in running]

    def hand_over(self, request_id: str) -> int:
        """End a prompt whose samples go on in another engine, to which the store passes the KV of
        the prompt; returns the number of tokens for which it does."""
        group = self.groups[request_id]
        request = next(each.request for each in group.samples if not each.request.is_finished)
        num_saved = self.engine.save_prefix(request)
        self.abort(request_id)
        return num_saved

    def end_isolation(self, request_id: str) -> None:
        """Let an isolated prompt share steps with others from now on. Unknown and ended ids are no
        error."""
        if (group := self.groups.get(request_id)) is not None:
            for sample in group.samples:
                self.engine.end_isolation(sample.request)

    def _withdraw(self, group: SampleGroup) -> None:
        for sample in group.samples:
            self.engine.abort(sample.request.request_id)
            self._samples.pop(sample.request.request_id, None)

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

    def step(self) -> tuple[list[Delta], EngineStep | None]:
        """Run one engine step; returns its deltas, sample by sample, and the step (None if none was
        run).

        A prompt whose samples have all ended is forgotten.
        """
        step = self.engine.step()
        deltas = [self._advance_or_fail(update) for update in step.updates] if step else []
        for delta in deltas:
            group = self.groups.get(delta.request_id)
            if group is not None and group.is_finished:
                del self.groups[delta.request_id]
        return deltas, step

    def _advance_or_fail(self, update: RequestUpdate) -> Delta:
        """Return the delta of an update; if its text cannot be made, this request ends with an
        error."""
        group, sample = self._samples[update.request.request_id]
        try:
            delta = self._advance(group, sample, update)
        except ENDINGS:
            raise
        except BaseException as error:
            request = update.request
            _log.exception("the text of request %s failed", request.request_id)
            self.engine.fail(request, f"{type(error).__name__}: {error}")
            delta = _ending(group, sample)
        if update.request.is_finished:
            del self._samples[update.request.request_id]
        return delta

    def _advance(self, group: SampleGroup, sample: TextSample, update: RequestUpdate) -> Delta:
        text, count = self._detokenize(sample, update.new_token_ids)
        logprobs = update.logprobs[:count]
        for entry in logprobs:
            sample.cumulative_logprob += entry.logprob
        request = update.request
        return Delta(
            sample.index,
            text,
            update.new_token_ids[:count],
            list(logprobs) if group.params.logprobs is not None else [],
            request.finish_reason.value if request.finish_reason is not None else None,
            request.stop_reason,
            sample.cumulative_logprob,
            request.error,
            group.request_id,
            update.prompt_logprobs,
        )

    def _detokenize(self, sample: TextSample, token_ids: list[int]) -> tuple[str, int]:
        """Return the text that new tokens add, and how many of them count: those up to the one
        that completes a stop string, which ends the request."""
        detokenizer, request = sample.detokenizer, sample.request
        if detokenizer is None:
            return "", len(token_ids)
        shown = token_ids
        if (
            token_ids
            and request.finish_reason is FinishReason.STOP
            and not request.params.include_stop_str_in_output
        ):
            shown = token_ids[:-1]  # the token that stopped it is not part of the text
        before = detokenizer.num_tokens
        text = detokenizer.push(shown)
        if detokenizer.stop_reason is not None:
            self.engine.stop(request, detokenizer.stop_reason, detokenizer.num_tokens)
            return text, detokenizer.num_tokens - before
        if request.is_finished:
            text += detokenizer.finish()
        return text, len(token_ids)


def _go_on(sample: TextSample, before: OutputSoFar) -> None:
    """Bring a new sample to where another engine had got with it; its text was sent from there."""
    request = sample.request
    request.token_ids += before.token_ids
    request.num_prompt_logprobs = request.num_prompt_tokens  # they were sent before any token
    sample.cumulative_logprob = before.cumulative_logprob
    if sample.detokenizer is not None:
        sample.detokenizer.push(before.token_ids)


def _ending(group: SampleGroup, sample: TextSample) -> Delta:
    """Return the last delta of a sample that ended without further text."""
    request = sample.request
    return Delta(
        sample.index,
        finish_reason=request.finish_reason.value if request.finish_reason is not None else None,
        stop_reason=request.stop_reason,
        cumulative_logprob=sample.cumulative_logprob,
        error=request.error,
        request_id=group.request_id,
    )


def _params_of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one sample of a prompt."""
    changes: dict[str, Any] = {}
    if params.structured_outputs is not None:  # its mask says when it may end (`create_mask`)
        changes |= {"min_tokens": 0, "ignore_eos": False}
    if index > 0 and params.prompt_logprobs is not None:
        changes["prompt_logprobs"] = None  # they are the same for all
    if params.num_samples > params.n and params.logprobs is None:
        changes["logprobs"] = 0  # by which the best are chosen
    return params.with_changes(**changes) if changes else params


def metrics_of(group: SampleGroup) -> RequestMetrics:
    """Return the metrics of a single sample; of several, from the first token of any to the last
    of all."""
    stats = [sample.request.stats for sample in group.samples]
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
    drafts = DraftStats()
    for one in stats:
        drafts.add(one.drafts)
    return RequestMetrics(
        queue_time=first.queue_time,
        ttft=first.ttft,
        tpot=tpot,
        e2e=e2e,
        prefill_tps=first.prefill_tps,
        decode_tps=decode_tps,
        num_cached_tokens=first.num_cached_tokens,
        miss_reason=first.miss_reason,
        num_preemptions=sum(one.num_preemptions for one in stats),
        drafts=drafts,
    )
