"""Drafts from a model: chains that it goes on with from its own tokens, for many requests at once.

A call is a step that computes what the model lacks of each request and samples a first token, and
then steps in which each request goes on from its last one, as long as it is likely enough to be
right. Answers do not depend on a draft, so that what goes wrong here costs speed and nothing else.
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
from octavo.speculation.draft_kv import KnownKV
from octavo.speculation.vocabulary import Translation

_log = logging.getLogger("octavo")

# Who lacks no more than this is in the flow of its answer, and waits for nobody. The others share
# so many tokens of a call while there is somebody who would have to wait for them.
_FEW_TOKENS = 16
_CATCH_UP_TOKENS = 64
# So many failures of a request in a row, and it is drafted for no more.
_MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class AutoregressiveLimits:
    """What a model can be asked for.

    Args:
        max_tokens: of a chain.
        min_probability: a chain ends before the token with which the chance that all of it is right
            falls below this; but not before the first.
        vocab_size: of the target's ids, those from here on mean nothing to the model.
        follows_masks: masks, whose bits are the target's, reach over all ids of the model.
        max_position: tokens that the model can have before it.
        max_step_tokens: that it computes in one step.
        translation: of the model's vocabulary, if it is another one.
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
    """A request, and the one that follows it into what may come next."""

    request: Request
    follower: Request
    room: int
    start: int  # the first position that the model has not computed
    text: list[int]  # the request's tokens, and what the model has said: -1 what means nothing
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    chance: float = 1.0  # that all of them are right
    is_over: bool = False

    @property
    def is_greedy(self) -> bool:
        return is_greedy(self.request.params)

    @property
    def num_missing(self) -> int:
        return len(self.follower.token_ids) - self.start


class _Work(NamedTuple):
    """What a step computes of a chain."""

    chain: _Chain
    num_tokens: int
    num_sampled: int


class AutoregressiveProposer:
    """A ``DraftProposer`` over anything that runs batches.

    Args:
        run: computes a batch, such as ``Runner.run``. It may sample fewer tokens than an item
            allows, and may raise.
        kv: what is computed already.
    """

    def __init__(
        self, run: Callable[[Batch], StepOutput], kv: KnownKV, limits: AutoregressiveLimits
    ):
        self.max_tokens = limits.max_tokens
        self.seconds = 0.0
        self.confidence = Confidence()
        self._run_batch = run
        self._kv = kv
        self._limits = limits
        self._followers: dict[str, Request] = {}
        self._verified: dict[str, list[float]] = {}  # probabilities of drafts under way
        self._gone: set[str] = set()  # whom the model may forget with its next batch
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
            self._draw(chains, is_alone=batch_tokens == 1)
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
        # The first wrong one was verified too; what follows it stood on nothing.
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

    # -- drawing chains ----------------------------------------------------------------------

    def _open(self, opening: DraftingRequest) -> _Chain | None:
        """A chain without tokens; None if the model can say nothing here."""
        request, limits = opening.request, self._limits
        num_known = len(request.token_ids)
        room = min(opening.room, limits.max_tokens, limits.max_position - num_known + 1)
        if room < 1:
            return None
        # The last token's logits are needed, whoever has computed it.
        start = min(self._kv.num_computed(request), num_known - 1)
        if max(request.token_ids[start:]) >= limits.vocab_size:
            self._failures[request.request_id] = _MAX_FAILURES  # no word of the model's
            return None
        return _Chain(request, self._follow(request), room, start, request.token_ids.copy())

    def _follow(self, request: Request) -> Request:
        """The request as the model sees it: as it is now, and free to go on."""
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
        """As the request has them: with the same random numbers, two distributions that are alike
        give the same token more often than any other choice of one would."""
        params, vocab_size = request.params, self._limits.vocab_size
        known = {i: by for i, by in (params.logit_bias or {}).items() if i < vocab_size}
        bias = dict(zip(self._translate([*known]), known.values(), strict=True))
        return replace(params, logprobs=0, prompt_logprobs=None, logit_bias=bias or None)

    def _translate(self, token_ids: Sequence[int]) -> list[int]:
        """As the model calls them."""
        translation = self._limits.translation
        if translation is None:
            return [*token_ids]
        return [*map(translation.to_draft.__getitem__, token_ids)]

    def _understand(self, token_id: int) -> int:
        """As the target calls it, -1 if it does not."""
        translation = self._limits.translation
        if translation is not None:
            return translation.drafted(token_id)
        return token_id if token_id < self._limits.vocab_size else -1

    def _draw(self, chains: list[_Chain], *, is_alone: bool) -> None:
        self._step(self._catch_up(chains, is_alone=is_alone))
        while going := [c for c in chains if c.token_ids and not c.is_over]:
            if self._has_failed:  # slots that others share may be spoilt
                break
            self._step([_Work(chain, 1, self._num_multi_steps(chain)) for chain in going])

    def _catch_up(self, chains: Sequence[_Chain], *, is_alone: bool) -> list[_Work]:
        """A step towards the last known token of each, within bounds: who lacks much of a prompt
        gets there over several calls, and nobody else waits for it."""
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

    def _num_multi_steps(self, chain: _Chain) -> int:
        """Tokens to ask for at once: as far as it goes if it remains as sure as it is now."""
        most = chain.room - len(chain.token_ids)
        least = self._limits.min_probability
        chance = self.confidence.chance(chain.probabilities[-1], is_greedy=chain.is_greedy)
        if least <= 0.0 or chance >= 1.0:
            return most
        further = math.log(least / chain.chance) / math.log(max(chance, 1e-9))
        return max(1, min(most, int(further)))

    def _step(self, works: Sequence[_Work]) -> None:
        """Compute, and take the tokens that come of it."""
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
            chain.text += map(self._understand, token_ids)
            chain.start += count + max(0, len(token_ids) - 1)
            if not output.errors:  # whoever fails may have spoilt what another shares with it
                self._kv.finish(chain.request, chain.text, chain.start)
            self._failures.pop(request_id, None)
            self._take(chain, token_ids, output.logprobs.get(request_id, []))

    def _take(
        self, chain: _Chain, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Of what was sampled, all that is likely enough to be right."""
        limits, params = self._limits, chain.request.params
        for said, entry in zip(token_ids, logprobs, strict=True):
            token_id = self._understand(said)
            probability = math.exp(entry.logprob)
            chain.chance *= self.confidence.chance(probability, is_greedy=chain.is_greedy)
            # The first is there anyhow, and what comes of it is how the next ones are judged.
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
