"""Autoregressive drafting, in which a draft model decodes a chain of tokens for each request.

A call first computes the tokens that the model has not seen yet of each request and samples one,
then decodes further tokens of each chain as long as these are likely enough to be accepted. An
error here costs speed and no answer: the target verifies every draft.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from octavo.core.batch import Batch, Draft, ScheduledRequest, StepOutput, TokenLogprobs
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.runtime.sampling_row import is_greedy
from octavo.speculation.confidence import Confidence
from octavo.speculation.draft_kv import ComputedKV
from octavo.speculation.vocabulary import Translation

_log = logging.getLogger("octavo")

# A request with at most so many tokens to compute goes first. Requests with more (a prompt) share
# _CATCH_UP_TOKENS of a call while others would wait for them.
_FEW_TOKENS = 16
_CATCH_UP_TOKENS = 64
_MAX_FAILURES = 3  # of a request in a row; after these it gets no drafts


@dataclass(frozen=True, slots=True)
class AutoregressiveLimits:
    """Limits of what a draft model is asked for.

    Args:
        max_tokens: the most tokens of a chain.
        min_probability: a chain ends before the token with which the chance that all of it is
            accepted falls below this, but not before its first token.
        vocab_size: target ids from here on are unknown to the model.
        follows_masks: True if the target's token masks cover all ids of the model.
        max_position: the longest context of the model, in tokens.
        max_step_tokens: the most tokens that it computes in one step.
        translation: between the vocabularies, if the model has another one.
    """

    max_tokens: int
    min_probability: float
    vocab_size: int
    follows_masks: bool
    max_position: int
    max_step_tokens: int
    translation: Translation | None = None


@dataclass(slots=True)
class _Chain:
    """The draft of a request that is being made, and the model's copy of the request."""

    request: Request
    follower: Request
    room: int
    start: int  # the first position that the model has not computed
    text: list[int]  # target ids: the request's and the drafted tokens; -1 without a target id
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    chance: float = 1.0  # that all of them are accepted
    is_over: bool = False

    @property
    def is_greedy(self) -> bool:
        return is_greedy(self.request.params)

    @property
    def num_missing(self) -> int:
        return len(self.follower.token_ids) - self.start


class _Work(NamedTuple):
    """The tokens that a step computes and samples of a chain."""

    chain: _Chain
    num_tokens: int
    num_sampled: int


class AutoregressiveProposer:
    """A ``DraftProposer`` over a function that runs batches of a model.

    Args:
        run: computes a batch, such as ``Runner.run``. It may sample fewer tokens than an item
            allows, and may raise.
        kv: the positions of requests whose KV the model has computed.
    """

    def __init__(
        self, run: Callable[[Batch], StepOutput], kv: ComputedKV, limits: AutoregressiveLimits
    ):
        self.max_tokens = limits.max_tokens
        self.seconds = 0.0
        self.confidence = Confidence()
        self._run_batch = run
        self._kv = kv
        self._limits = limits
        self._followers: dict[str, Request] = {}
        self._verified: dict[str, list[float]] = {}  # probabilities of drafts under verification
        self._gone: set[str] = set()  # requests that the model's next batch reports as finished
        self._failures: Counter[str] = Counter()
        self._has_failed = False  # in this call
        self._has_warned = False

    def wants(self, request: Request) -> bool:
        return (
            len(request.token_ids) <= self._limits.max_position
            and self._failures[request.request_id] < _MAX_FAILURES
        )

    def propose(
        self, openings: Sequence[DraftingRequest], batch_tokens: int
    ) -> Mapping[str, Draft]:
        begin = time.perf_counter()
        chains: list[_Chain] = []
        try:
            chains += filter(None, map(self._open, openings))
            self._draft(chains, is_alone=batch_tokens == 1)
        except Exception as error:
            for request, _ in openings:
                self._note_failure(request, f"{type(error).__name__}: {error}")
        if self._has_failed:
            self._kv.abandon()
            self._has_failed = False
        drafts: dict[str, Draft] = {}
        for chain in chains:
            if chain.token_ids:
                drafts[chain.request.request_id] = Draft.chain(chain.token_ids)
                self._verified[chain.request.request_id] = chain.probabilities
        self.seconds += time.perf_counter() - begin
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        probabilities = self._verified.pop(request.request_id, [])
        greedy = is_greedy(request.params)
        # The first rejected token was verified too; those after it had no valid context.
        for index, probability in enumerate(probabilities[: min(len(draft), num_accepted + 1)]):
            is_right = index < num_accepted
            self.confidence.learn(probability, is_greedy=greedy, is_right=is_right)

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        request_id = request.request_id
        self._kv.forget(request)
        if self._followers.pop(request_id, None) is not None:
            self._gone.add(request_id)
        self._verified.pop(request_id, None)
        self._failures.pop(request_id, None)

    # -- drafting ----------------------------------------------------------------------------

    def _open(self, opening: DraftingRequest) -> _Chain | None:
        """A chain without tokens yet; None if the model cannot draft for the request."""
        request, limits = opening.request, self._limits
        num_known = len(request.token_ids)
        room = min(opening.max_tokens, limits.max_tokens, limits.max_position - num_known + 1)
        if room < 1:
            return None
        # The last token is computed again even if its KV is there: its logits are needed.
        start = min(self._kv.num_computed(request), num_known - 1)
        if max(request.token_ids[start:]) >= limits.vocab_size:
            self._failures[request.request_id] = _MAX_FAILURES  # the model has no such token
            return None
        return _Chain(request, self._follow(request), room, start, request.token_ids.copy())

    def _follow(self, request: Request) -> Request:
        """The model's copy of a request, brought up to its tokens and blocks."""
        follower = self._followers.get(request.request_id)
        if follower is None:
            follower = Request(
                request.request_id,
                self._translate(request.prompt_token_ids),
                self._params(request),
                request.arrival_time,
                seed=request.seed,
                sample_index=request.sample_index,
            )
            self._followers[request.request_id] = follower
        follower.token_ids = self._translate(request.token_ids)
        follower.block_ids = request.block_ids
        follower.mask = None
        if self._limits.follows_masks and request.is_masked:
            assert request.mask is not None
            follower.mask = request.mask.fork()
        return follower

    def _params(self, request: Request) -> SamplingParams:
        """The request's own sampling parameters and random numbers: with the same ones, target and
        draft model sample the same token more often than with independent ones."""
        params, vocab_size = request.params, self._limits.vocab_size
        known = {i: by for i, by in (params.logit_bias or {}).items() if i < vocab_size}
        bias = dict(zip(self._translate([*known]), known.values(), strict=True))
        return replace(params, logprobs=0, prompt_logprobs=None, logit_bias=bias or None)

    def _translate(self, token_ids: Sequence[int]) -> list[int]:
        """The model's ids of target tokens."""
        translation = self._limits.translation
        if translation is None:
            return [*token_ids]
        return [*map(translation.to_draft.__getitem__, token_ids)]

    def _target_id(self, token_id: int) -> int:
        """The target's id of a model token; -1 if it has none."""
        translation = self._limits.translation
        if translation is not None:
            return translation.drafted(token_id)
        return token_id if token_id < self._limits.vocab_size else -1

    def _draft(self, chains: list[_Chain], *, is_alone: bool) -> None:
        """Extend all chains until each is over."""
        self._step(self._catch_up(chains, is_alone=is_alone))
        while going := [c for c in chains if c.token_ids and not c.is_over]:
            if self._has_failed:  # slots that requests share may hold wrong KV
                break
            self._step([_Work(chain, 1, self._num_to_sample(chain)) for chain in going])

    def _catch_up(self, chains: Sequence[_Chain], *, is_alone: bool) -> list[_Work]:
        """Plan a step that computes the known tokens which the model lacks, within a budget: a long
        prompt is computed over several calls, so that the other requests do not wait for it."""
        left = self._limits.max_step_tokens
        shared = left if is_alone else min(left, _CATCH_UP_TOKENS)
        works: list[_Work] = []
        for chain in sorted(chains, key=lambda chain: chain.num_missing):
            missing = chain.num_missing
            count = min(missing, left if missing <= _FEW_TOKENS else min(left, shared))
            if count == 0:
                break
            left -= count
            if missing > _FEW_TOKENS:
                shared -= count
            works.append(_Work(chain, count, num_sampled=int(count == missing)))
        return works

    def _num_to_sample(self, chain: _Chain) -> int:
        """Tokens to sample in one call: as many as the chain gets at its latest probability."""
        most = chain.room - len(chain.token_ids)
        least = self._limits.min_probability
        chance = self.confidence.chance(chain.probabilities[-1], is_greedy=chain.is_greedy)
        if least <= 0.0 or chance >= 1.0:
            return most
        further = math.log(least / chain.chance) / math.log(max(chance, 1e-9))
        return max(1, min(most, int(further)))

    def _step(self, works: Sequence[_Work]) -> None:
        """Run a step, and add the tokens that it samples to the chains."""
        if not works:
            return
        items = []
        for chain, count, num_sampled in works:
            end = chain.start + count + max(0, num_sampled - 1)
            self._kv.begin(chain.request, chain.start, end)
            items.append(ScheduledRequest(chain.follower, chain.start, count, num_sampled))
        output = self._run_batch(Batch(0, tuple(items), finished_ids=tuple(self._gone)))
        self._gone.clear()
        for chain, count, num_sampled in works:
            request_id = chain.request.request_id
            if request_id in output.errors:
                chain.is_over = True
                self._note_failure(chain.request, output.errors[request_id])
                continue
            token_ids = output.token_ids.get(request_id, []) if num_sampled else []
            chain.is_over = not token_ids
            chain.follower.token_ids += token_ids
            chain.text += map(self._target_id, token_ids)
            chain.start += count + max(0, len(token_ids) - 1)
            if not output.errors:  # a request that failed may have left wrong KV in shared blocks
                self._kv.finish(chain.request, chain.text, chain.start)
            self._failures.pop(request_id, None)
            self._take(chain, token_ids, output.logprobs.get(request_id, []))

    def _take(
        self, chain: _Chain, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Add the sampled tokens to a chain, up to the first that is too unlikely."""
        limits, params = self._limits, chain.request.params
        for sampled_id, entry in zip(token_ids, logprobs, strict=True):
            token_id = self._target_id(sampled_id)
            probability = math.exp(entry.logprob)
            chain.chance *= self.confidence.chance(probability, is_greedy=chain.is_greedy)
            # The first token cost nothing more, and its verification is how others are judged.
            is_unlikely = chain.token_ids and chain.chance < limits.min_probability
            if is_unlikely or token_id < 0:
                chain.is_over = True
                return
            chain.token_ids.append(token_id)
            chain.probabilities.append(probability)
            ends = token_id in chain.request.eos_token_ids and not params.ignore_eos
            if ends or len(chain.token_ids) == chain.room:
                chain.is_over = True
                return

    def _note_failure(self, request: Request, reason: str) -> None:
        self._has_failed = True
        self._failures[request.request_id] += 1
        if self._failures[request.request_id] < _MAX_FAILURES:
            return
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _log.log(level, "request %s gets no more drafts: %s", request.request_id, reason)
