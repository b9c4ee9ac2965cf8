"""Work of a step: bytes and operations of each part of a model.

Counting and the clock are apart. The same counts tell the planner and the simulator how long a step
would take (`octavo.cost.step_cost`), and a benchmark how close a measured one came to what the
device can do. It is the least that a step does: every weight is read once, the head where something
is sampled, and every key once for each sequence that sees it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple, Protocol

from octavo.cost.rank_model import AttentionOp, Experts, MatrixOp, RankModel


class Chunk(Protocol):
    """Some tokens of a sequence, one after the other, as `octavo.core.batch` has them.

    ``num_sampled`` is 0 where the token after them is not wanted. A ``draft`` is their last tokens,
    to be verified: every row from the one before it on is sampled.
    """

    @property
    def num_seen(self) -> int:
        """Tokens before its first one that this sees: all, but for a request with a sink window."""
        ...

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_sampled(self) -> int: ...
    @property
    def draft(self) -> Sized | None: ...


class Span(NamedTuple):
    """A chunk of its own, for who has no request."""

    start: int
    num_tokens: int
    num_sampled: int = 1
    draft: Sized | None = None

    @property
    def num_seen(self) -> int:
        return self.start

    @property
    def samples(self) -> bool:
        return self.num_sampled > 0

    @classmethod
    def verifying(cls, start: int, num_drafted: int) -> Span:
        """A sequence of ``start`` computed tokens decodes one, and verifies drafts after it."""
        return cls(start, 1 + num_drafted, 1 + num_drafted, range(num_drafted))


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Bytes to move between memory and processor, and operations to do.

    A multiplication and the addition that follows it are two operations.
    """

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: ResourceUse) -> ResourceUse:
        return ResourceUse(self.bytes + other.bytes, self.flops + other.flops)


NOTHING = ResourceUse()


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one or more steps: matrix products, those of the output head apart, attention."""

    linear: ResourceUse = NOTHING
    head: ResourceUse = NOTHING
    attention: ResourceUse = NOTHING

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.linear + other.linear,
            self.head + other.head,
            self.attention + other.attention,
        )

    @property
    def total(self) -> ResourceUse:
        return self.linear + self.head + self.attention


def step_work(model: RankModel, chunks: Iterable[Chunk], num_multi_steps: int = 1) -> StepWork:
    """Count the work of one rank in a step with these chunks; see `passes` for multi-step
    batches."""
    done = StepWork()
    for rows in passes(chunks, num_multi_steps):
        products = {True: NOTHING, False: NOTHING}
        for matrix in model.matrices:
            products[matrix.sampled_only] += matrix_work(matrix, rows, model)
        attention = NOTHING
        for op in model.attention:
            attention += decode_attention_work(op, rows) + prompt_attention_work(op, rows)
        done += StepWork(products[False], products[True], attention)
    return done


# -- rows -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class RowCounts:
    """The rows of one pass through a model.

    Args:
        num_tokens: all rows. num_sampled: those of which logits are made.
        singles: where each sequence that computes one token is.
        drafts: (start, number) of tokens that are sampled one and all.
        prompts: (start, number) of all others.
        shared_keys: that sequences which decode see in blocks of each other, counted for all but
            one of them. They come from memory once; how much is won by that has to be measured.
    """

    num_tokens: int
    num_sampled: int
    singles: list[int]
    drafts: Sequence[tuple[int, int]] = ()
    prompts: Sequence[tuple[int, int]] = ()
    shared_keys: int = 0

    @property
    def num_seqs(self) -> int:
        return len(self.singles) + len(self.drafts) + len(self.prompts)

    def on_busiest(self, num_ranks: int) -> RowCounts:
        """Return the rows of the rank that has most, where ranks share out requests evenly: each
        gets one after the other, those first that see most."""
        if num_ranks == 1:
            return self
        singles = sorted(self.singles, reverse=True)[::num_ranks]
        drafts, prompts = (
            sorted(spans, key=sum, reverse=True)[::num_ranks]
            for spans in (self.drafts, self.prompts)
        )
        num_tokens = len(singles) + sum(count for _, count in (*drafts, *prompts))
        return RowCounts(num_tokens, min(self.num_sampled, num_tokens), singles, drafts, prompts)


def passes(
    chunks: Iterable[Chunk], num_multi_steps: int = 1, shared_keys: int = 0
) -> Iterator[RowCounts]:
    """The passes of a step. In steps after the first, each chunk that samples goes on with one
    token, and all weights are read again. ``shared_keys``: as of ``RowCounts``."""
    chunks = list(chunks)
    first = _first_pass(chunks)
    first.shared_keys = shared_keys
    yield first
    if num_multi_steps > 1:
        ends = [chunk.num_seen + chunk.num_tokens for chunk in chunks if chunk.num_sampled]
        for later in range(num_multi_steps - 1):
            yield RowCounts(len(ends), len(ends), [end + later for end in ends])


def _first_pass(chunks: Iterable[Chunk]) -> RowCounts:
    """One loop over a batch: a simulator does it for every step."""
    num_tokens = num_sampled = 0
    singles: list[int] = []
    drafts: list[tuple[int, int]] = []
    prompts: list[tuple[int, int]] = []
    for chunk in chunks:
        count = chunk.num_tokens
        num_tokens += count
        if count == 1:
            num_sampled += chunk.num_sampled > 0
            singles.append(chunk.num_seen)
            continue
        sampled, draft = 0, chunk.draft
        if chunk.num_sampled:
            sampled = 1 if draft is None else 1 + len(draft)
        num_sampled += sampled
        (drafts if count == sampled else prompts).append((chunk.num_seen, count))
    return RowCounts(num_tokens, num_sampled, singles, drafts, prompts)


# -- attention ------------------------------------------------------------------------------------


class SeenTokens(NamedTuple):
    """``keys`` that are read, or written first; ``scores``, pairs of a query and a key that it
    sees."""

    keys: int
    scores: int


def decode_attention_work(op: AttentionOp, rows: RowCounts) -> ResourceUse:
    """Attention of sequences that decode a token, or verify several."""
    rows = rows.on_busiest(op.num_sharing)
    keys, scores = seen_by_singles(rows.singles, op.reach)
    if rows.drafts:
        more = seen_by_spans(rows.drafts, op.reach)
        keys, scores = keys + more.keys, scores + more.scores
    per_score = op.decode_flops_per_score
    flops = (op.flops_per_score if per_score is None else per_score) * scores
    num_seqs = len(rows.singles) + len(rows.drafts)
    return _attention_work(op, keys, flops, num_seqs)


def prompt_attention_work(op: AttentionOp, rows: RowCounts) -> ResourceUse:
    """Attention of pieces of prompts."""
    rows = rows.on_busiest(op.num_sharing)
    if not rows.prompts:
        return NOTHING
    keys, scores = seen_by_spans(rows.prompts, op.reach)
    return _attention_work(op, keys, op.flops_per_score * scores, len(rows.prompts))


def _attention_work(op: AttentionOp, keys: int, flops: float, num_seqs: int) -> ResourceUse:
    states = 2 * num_seqs * op.state_bytes  # read, and written
    return ResourceUse(op.count * (keys * op.kv_bytes_per_token + states), op.count * flops)


def seen_by_singles(starts: Sequence[int], window: int | None) -> SeenTokens:
    """Count tokens at ``starts``, each of another sequence."""
    count = len(starts)
    if window is None:
        scores = sum(starts) + count
    else:
        scores = sum([start + 1 if start < window else window for start in starts])
    return SeenTokens(scores + count, scores)


def seen_by_spans(spans: Iterable[tuple[int, int]], window: int | None) -> SeenTokens:
    """Count by (start, number) of new tokens of each sequence, whose keys are read once."""
    keys = scores = 0
    for start, num_tokens in spans:
        end = start + num_tokens
        # The new keys are written, and then read with the others.
        keys += num_tokens
        keys += end if window is None else min(end, num_tokens + window - 1)
        scores += _causal_scores(end, window) - _causal_scores(start, window)
    return SeenTokens(keys, scores)


def _causal_scores(num_tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, among the first tokens of a sequence."""
    growing = num_tokens if window is None else min(num_tokens, window)
    return growing * (growing + 1) // 2 + (num_tokens - growing) * growing


# -- matrix products ------------------------------------------------------------------------------


def matrix_work(matrix: MatrixOp, rows: RowCounts, model: RankModel) -> ResourceUse:
    """Count a product in all of its layers."""
    rows = rows.on_busiest(matrix.num_sharing)
    num_rows = rows.num_sampled if matrix.sampled_only else rows.num_tokens
    if not num_rows:
        return NOTHING
    if matrix.experts is not None:
        return _experts_work(matrix, matrix.experts, num_rows, model)
    activations = num_rows * (matrix.inputs + matrix.outputs) * model.activation_bytes
    return ResourceUse(
        matrix.count * (matrix.num_bytes + activations),
        2.0 * matrix.count * matrix.num_params * num_rows,
    )


def _experts_work(
    matrix: MatrixOp, experts: Experts, num_rows: int, model: RankModel
) -> ResourceUse:
    """Count experts on the rank that most rows go to, and most experts are used of, for which all
    others wait."""
    parallel = model.parallel
    num_tokens = num_rows * max(1, parallel.ep // parallel.tp)  # of all who share the experts
    uses = num_tokens * experts.per_token
    hit = experts_hit(experts.total, experts.per_token, num_tokens)
    share = experts.on_rank / experts.total
    here = busiest(uses * share, parallel.ep, uses)
    read = busiest(hit * share, parallel.ep, min(experts.on_rank, hit), 1.0 - hit / experts.total)
    activations = here * (matrix.inputs + matrix.outputs) * model.activation_bytes
    return ResourceUse(
        matrix.count * (matrix.num_bytes * read / experts.on_rank + activations),
        2.0 * matrix.count * matrix.num_params / experts.on_rank * here,
    )


def experts_hit(total: int, per_token: int, num_tokens: int) -> float:
    """Number of a layer's experts that some token uses, if all are equally likely: E (1 - (1 -
    k/E)^T)."""
    return float(total * (1.0 - (1.0 - per_token / total) ** num_tokens))


def ranks_hit(experts: Experts, num_ranks: int) -> float:
    """Number of ranks that have one of a token's experts, if all are equally likely and ranks have
    as many each: n (1 - C(E - E/n, k) / C(E, k)), where k experts of E do not repeat."""
    total, on_rank = experts.total, experts.total / num_ranks
    missed = math.prod(
        max(0.0, total - on_rank - chosen) / (total - chosen) for chosen in range(experts.per_token)
    )
    return num_ranks * (1.0 - missed)


def busiest(mean: float, num_ranks: int, most: float, left: float = 1.0) -> float:
    """Number of things on the busiest of some ranks, where each goes to one by chance and ``mean``
    to each: about the largest of so many normal numbers, and 1 to ``most``.

    ``left``: share of all things that are left, where none is taken twice; it keeps ranks alike.
    """
    deviation = math.sqrt(mean * (1.0 - 1.0 / num_ranks) * left)
    return min(most, max(1.0, mean + busiest_deviations(num_ranks) * deviation))


@lru_cache(maxsize=64)
def busiest_deviations(num_ranks: int) -> float:
    """Standard deviations by which the largest of so many normal numbers is above their mean, on
    average (Blom, Statistical Estimates and Transformed Beta-Variables, 1958)."""
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
