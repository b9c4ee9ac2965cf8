"""Rows of logits with the sampling parameters and history that turn each into a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Protocol

from octavo.core.batch import Draft
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_counts import SeenTokens, TokenCounts
from octavo.core.token_mask import Bits, MaskPart, TokenMask

# A lower temperature is treated as 0.
GREEDY_TEMPERATURE = 1e-5


def is_greedy(params: SamplingParams) -> bool:
    """Return whether the most likely token is taken, without drawing."""
    return params.temperature < GREEDY_TEMPERATURE


class MaskedRow(Protocol):
    """A row with its mask: a request, or a request after a draft."""

    @property
    def mask_seconds(self) -> float: ...

    def mask_parts(self) -> Sequence[MaskPart]: ...

    def bitmask(self) -> Bits | None: ...


def make_together(rows: Iterable[MaskedRow]) -> None:
    """Make what takes time of the masks of several rows, by all cores at once.

    An error is none here: it comes up again in the ``bitmask`` of the row that has it.
    """
    with suppress(Exception):
        if parts := [part for row in rows for part in row.mask_parts()]:
            parts[0].make_together(parts)


@dataclass(slots=True)
class SamplingRow:
    """The parameters and history of one row to sample, taken from a request."""

    params: SamplingParams
    seed: int  # 64 bits; the request's own, or drawn for it by the front end
    sample_index: int  # which of the n samples this is
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # the token to sample has position len(output_token_ids)
    bits: Bits | None = None  # the allowed tokens; None: all
    seen: SeenTokens | None = None  # counts of tokens, if they exist already

    @property
    def is_greedy(self) -> bool:
        return is_greedy(self.params)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def output_since(self, count: int) -> Sequence[int]:
        return self.output_token_ids[count:]

    def seen_tokens(self) -> SeenTokens:
        if self.seen is not None:
            return self.seen
        has_repetition = self.params.repetition_penalty != 1.0
        counts = TokenCounts(self.prompt_token_ids if has_repetition else ())
        counts.advance(self.output_token_ids)
        return SeenTokens(counts, {})

    @property
    def mask_seconds(self) -> float:
        return 0.0

    def mask_parts(self) -> Sequence[MaskPart]:
        return ()

    def bitmask(self) -> Bits | None:
        return self.bits

    @property
    def is_constrained(self) -> bool:
        """True if a mask, a bias or a penalty changes this row's logits."""
        params = self.params
        return self.bits is not None or bool(params.logit_bias) or params.has_penalties


class DraftedMasks:
    """The masks of a request after each of some paths of drafted tokens.

    All are made when the first is asked for, so that each token is followed once.
    """

    __slots__ = ("_found", "_mask", "_paths", "seconds")

    def __init__(self, mask: TokenMask, paths: Sequence[tuple[int, ...]]):
        self._mask, self._paths = mask, paths
        self._found: list[Bits | None] | None = None
        self.seconds = mask.seconds

    def bitmask(self, index: int) -> Bits | None:
        """Return the tokens that are allowed after a path; None if all are."""
        if self._found is None:
            self._found = self._follow()
        return self._found[index]

    def _follow(self) -> list[Bits | None]:
        """Follow the paths, and return to where the mask was."""
        found: list[Bits | None] = []
        at: tuple[int, ...] = ()
        try:
            for path in self._paths:
                shared = len(commonprefix([at, path]))
                self._mask.rollback(len(at) - shared)
                at = path[:shared]
                self._mask.advance(path[shared:])
                at = path
                found.append(self._mask.bitmask())
        finally:
            self._mask.rollback(len(at))
        return found


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """The row of a request as it would be after drafted tokens."""

    request: Request
    drafted: tuple[int, ...]  # the path from the last known token
    masks: DraftedMasks | None  # None: nothing is forbidden
    index: int  # of the path among theirs

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def sample_index(self) -> int:
        return self.request.sample_index

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.request.prompt_token_ids

    @property
    def num_output_tokens(self) -> int:
        return self.request.num_output_tokens + len(self.drafted)

    def output_since(self, count: int) -> list[int]:
        return [*self.request.output_since(count), *self.drafted]

    def seen_tokens(self) -> SeenTokens:
        counts = self.request.seen_tokens().counts
        return SeenTokens(counts, counts.after(self.drafted))

    @property
    def mask_seconds(self) -> float:
        return 0.0 if self.masks is None else self.masks.seconds

    def mask_parts(self) -> Sequence[MaskPart]:
        return ()

    def bitmask(self) -> Bits | None:
        return None if self.masks is None else self.masks.bitmask(self.index)


class _Output(Sequence[int]):
    """A request's output followed by drafted tokens, without a copy."""

    __slots__ = ("_drafted", "_request")

    def __init__(self, request: Request, drafted: tuple[int, ...]):
        self._request, self._drafted = request, drafted

    def __len__(self) -> int:
        return self._request.num_output_tokens + len(self._drafted)

    def __getitem__(self, index: Any) -> Any:
        return [*self._request.output_token_ids, *self._drafted][index]


def sampling_row(request: Request | DraftedRow) -> SamplingRow:
    """Return the row of a request as it is now."""
    if isinstance(request, DraftedRow):
        output = _Output(request.request, request.drafted)
    else:
        output = _Output(request, ())
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        sample_index=request.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=output,
        bits=request.bitmask(),
        seen=request.seen_tokens() if request.params.has_penalties else None,
    )


def rows_of(request: Request, draft: Draft) -> list[Request | DraftedRow]:
    """Return the rows of a request with a draft: as it is now, and as it would be after each
    drafted token. Each samples what a single step would have sampled there."""
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    masks = None
    if request.is_masked:
        assert request.mask is not None  # and it has followed the known tokens
        masks = DraftedMasks(request.mask, paths)
    return [request, *(DraftedRow(request, path, masks, at) for at, path in enumerate(paths))]
