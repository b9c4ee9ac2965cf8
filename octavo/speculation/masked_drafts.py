"""`MaskedDrafts`, which drafts what masks force, and cuts drafts where masks forbid them.

A grammar often leaves no choice: after ``{"na`` comes ``me":`` where a schema has one property.
Such text is drafted as the tokenizer writes it, and verified like any other draft, because other
tokens may write the same text, and the model decides. So answers stay those of plain decoding.

    requests with a mask      its forced tokens, as many as pay in a step of so many rows
    those that have none      a draft of the drafter, if there is one, up to the first token that
                              their mask forbids
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest, DraftProposer
from octavo.core.request import Request
from octavo.speculation.analysis import best_drafts
from octavo.speculation.step_times import StepTimeEstimator

_MAX_TOKENS = 16  # of a draft, without a drafter
# The prior of the share of forced tokens that are accepted, and the tokens that it weighs.
_PRIOR = 0.9
_PRIOR_TOKENS = 4.0
_FADED = 0.98  # of what is known of them, where they are not drafted
# Now and then drafts are half as long, so that steps of fewer rows are timed too.
_HALVED_EVERY = 16  # proposals
_LEAST_GAIN = 1.04  # of the tokens a second of a step


@dataclass(slots=True)
class _Rate:
    """Counts of tokens that were verified and accepted, where those before them were."""

    tried: float = 0.0
    right: float = 0.0

    def chance(self, prior: float) -> float:
        return (self.right + _PRIOR_TOKENS * prior) / (self.tried + _PRIOR_TOKENS)

    def take(self, is_right: bool) -> None:
        if self.tried >= 200:  # a change of text is followed
            self.tried, self.right = self.tried / 2, self.right / 2
        self.tried += 1
        self.right += is_right

    def fade(self) -> None:
        self.tried, self.right = _FADED * self.tried, _FADED * self.right


@dataclass(slots=True)
class _Rates:
    """Rates of the last token of a forced text, which longer text may write otherwise, and of the
    tokens before it."""

    inner: _Rate = field(default_factory=_Rate)
    last: _Rate = field(default_factory=_Rate)


class MaskedDrafts:
    """A ``DraftProposer`` around another one, or without any.

    A request without a mask costs what it costs with the other proposer alone.

    Args:
        proposer: the drafter's, whose most tokens of a draft are those of forced ones too; None
            for none.
    """

    def __init__(self, proposer: DraftProposer | None = None):
        self.proposer = proposer
        self.max_tokens = _MAX_TOKENS if proposer is None else proposer.max_tokens
        self._seconds = 0.0
        self._num_proposals = 0
        self._times = StepTimeEstimator()
        self._shared = _Rates()
        self._rates: dict[str, _Rates] = {}  # of requests that had forced tokens
        self._lengths: dict[str, int] = {}  # of the forced text whose draft is being verified

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self.proposer is None else self.proposer.seconds)

    def wants(self, request: Request) -> bool:
        if request.mask is not None and self._forced(request):
            return True
        return self.proposer is not None and self.proposer.wants(request)

    def propose(
        self, openings: Sequence[DraftingRequest], batch_tokens: int
    ) -> Mapping[str, Draft]:
        if self.proposer is not None and all(each.request.mask is None for each in openings):
            return self.proposer.propose(openings, batch_tokens)
        begin = time.perf_counter()
        drafts = self._forced_drafts(openings, batch_tokens)
        self._seconds += time.perf_counter() - begin
        left = [opening for opening in openings if opening.request.request_id not in drafts]
        rows = batch_tokens + sum(map(len, drafts.values()))
        found = self._found(left, rows)
        begin = time.perf_counter()
        for request, _ in left:
            draft = found.get(request.request_id)
            if draft is not None and (allowed := _allowed(request, draft)) is not None:
                drafts[request.request_id] = allowed
        self._seconds += time.perf_counter() - begin
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        length = self._lengths.pop(request.request_id, None)
        if length is None:
            if self.proposer is not None:
                self.proposer.observe(request, draft, num_accepted)
            return
        own = self._rates.setdefault(request.request_id, _Rates())
        for index in range(min(len(draft), num_accepted + 1)):
            for rates in (own, self._shared):
                rate = rates.last if index == length - 1 else rates.inner
                rate.take(index < num_accepted)
        if request.is_finished:  # and forgotten
            del self._rates[request.request_id]

    def observe_step(self, batch: Batch, seconds: float) -> None:
        if self._rates:
            self._times.observe(batch, seconds)
        if self.proposer is not None:
            self.proposer.observe_step(batch, seconds)

    def forget(self, request: Request) -> None:
        self._rates.pop(request.request_id, None)
        self._lengths.pop(request.request_id, None)
        if self.proposer is not None:
            self.proposer.forget(request)

    def _forced(self, request: Request) -> Sequence[int]:
        """Return the tokens that a request's mask forces now."""
        if not request.is_masked:
            return ()
        assert request.mask is not None
        return request.mask.forced_tokens(self.max_tokens)

    def _forced_drafts(
        self, openings: Sequence[DraftingRequest], batch_tokens: int
    ) -> dict[str, Draft]:
        """Return as many forced tokens as bring the most tokens a second of the step."""
        forced: list[Sequence[int]] = []
        chances: list[list[float]] = []
        for request, room in openings:
            self._lengths.pop(request.request_id, None)
            tokens = self._forced(request) if request.mask is not None else ()
            forced.append(tokens)
            chances.append(self._chances(request, len(tokens))[:room] if tokens else [])
        if not any(forced):
            return {}

        def seconds(rows: int) -> float:
            return self._times.seconds(rows) * (1.0 if rows == batch_tokens else _LEAST_GAIN)

        counts = best_drafts(chances, seconds, num_rows=batch_tokens, num_tokens=batch_tokens)
        self._num_proposals += any(counts)
        if self._num_proposals % _HALVED_EVERY == 0:
            counts = [count // 2 for count in counts]
        drafts: dict[str, Draft] = {}
        for (request, _), tokens, count in zip(openings, forced, counts, strict=True):
            if count:
                drafts[request.request_id] = Draft.chain(tokens[:count])
                self._lengths[request.request_id] = len(tokens)
            elif tokens:  # they are tried again in time
                for rates in (self._rates[request.request_id], self._shared):
                    rates.inner.fade()
                    rates.last.fade()
        return drafts

    def _chances(self, request: Request, count: int) -> list[float]:
        """Return the chances that forced tokens are accepted, each if those before it are."""
        own = self._rates.setdefault(request.request_id, _Rates())
        inner = own.inner.chance(self._shared.inner.chance(_PRIOR))
        last = own.last.chance(self._shared.last.chance(_PRIOR))
        return [inner] * (count - 1) + [last]

    def _found(self, openings: Sequence[DraftingRequest], batch_tokens: int) -> Mapping[str, Draft]:
        """Return drafts of the other proposer, for those requests that it wants."""
        proposer = self.proposer
        if proposer is None:
            return {}
        wanted = [each for each in openings if proposer.wants(each.request)]
        return proposer.propose(wanted, batch_tokens) if wanted else {}


def _allowed(request: Request, draft: Draft) -> Draft | None:
    """Return what a request's mask allows of a draft; None if that is nothing."""
    if not request.is_masked:
        return draft
    mask = request.mask
    assert mask is not None
    if draft.is_chain:
        count = mask.num_allowed(draft.token_ids)
        return draft.first(count) if count else None
    paths: list[tuple[int, ...]] = []
    places: dict[int, int] = {-1: -1}  # of the tokens that stay
    for index, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
        if parent in places and mask.num_allowed(paths[-1]) == len(paths[-1]):
            places[index] = len(places) - 1
    del places[-1]
    if not places:
        return None
    token_ids = tuple(draft.token_ids[index] for index in places)
    parents = tuple(places.get(draft.parents[index], -1) for index in places)
    return Draft(token_ids, parents)
