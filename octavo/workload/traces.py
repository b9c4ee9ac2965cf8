"""Traces of the requests to real servers, with arrival times and lengths.

``read_trace`` and ``write_trace`` convert the formats of ``trace_formats``; ``to_requests`` makes
prompts that share what the trace says they shared; ``statistics`` describes a trace.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise, takewhile
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from octavo.base.errors import ConfigError
from octavo.measure.results import write_text
from octavo.measure.statistics import percentile
from octavo.workload.requests import WorkloadRequest
from octavo.workload.rows import (
    BadRow,
    WorkloadFileError,
    csv_rows,
    json_row,
    json_rows,
    label,
    open_text,
    optional,
    peek,
)
from octavo.workload.trace_formats import (
    BLOCKS,
    FORMATS,
    REQUIRED,
    ServiceLevel,
    TraceEntry,
    TraceFormat,
)

__all__ = [
    "KINDS",
    "ServiceLevel",
    "TraceEntry",
    "TraceStatistics",
    "WorkloadFileError",
    "allowed_token_ids",
    "check_replay",
    "detect_trace",
    "lost_fields",
    "random_token_ids",
    "read_trace",
    "statistics",
    "to_requests",
    "with_block_size",
    "write_trace",
]

KINDS = tuple(FORMATS)
FIRST_ORDINARY_TOKEN = 1000  # special tokens and single bytes are at the beginning of vocabularies


# -- reading --------------------------------------------------------------------------------------


def read_trace(
    path: str | Path, kind: str = "auto", *, limit: int | None = None, keep_failures: bool = False
) -> list[TraceEntry]:
    """Read the entries of a trace, by time of arrival (rows of the same time keep their order).

    ``kind``: one of ``KINDS``; "auto" detects it by the first line. ``limit``: the first so many
    that count. ``keep_failures``: keep BurstGPT's requests without an answer, which are dropped
    otherwise. The file is read once, and no further than needed.

    Raises:
        WorkloadFileError: a line has another format; says which, and what is expected.
    """
    with open_text(path) as file:
        first, lines = peek(file)
        kind = _detect(path, first) if kind == "auto" else kind
        entries = _parse(path, _format(kind)(), lines)
        if kind == "burstgpt" and not keep_failures:
            entries = (entry for entry in entries if entry.output_len > 0)
        trace = sorted(islice(entries, limit), key=lambda entry: entry.arrival_s)
    if not trace and limit != 0:
        raise WorkloadFileError(path, "there is no request in this trace")
    if kind == "azure" and trace and trace[0].arrival_s < 0:  # its first row was not the earliest
        trace = _from_zero(trace)
    return trace


def detect_trace(path: str | Path) -> str:
    """Return the kind of a trace, by its first line. Raises WorkloadFileError if it is none."""
    with open_text(path) as file:
        return _detect(path, peek(file)[0])


def _detect(path: str | Path, first: str) -> str:
    if first.startswith("{"):
        try:
            names = set(json_row(first))
        except BadRow as problem:
            raise WorkloadFileError(path, str(problem), 1) from None
        candidates = [name for name, format in FORMATS.items() if not format.is_csv]
    else:
        names = {name.strip() for name in first.split(",")}
        candidates = [name for name, format in FORMATS.items() if format.is_csv]
    fitting = [name for name in candidates if names >= set(FORMATS[name].columns)]
    if not fitting:
        known = "; ".join(f"{name}: {', '.join(f.columns)}" for name, f in FORMATS.items())
        raise WorkloadFileError(path, f"no trace format has this first line. Expected {known}", 1)
    if names <= {*FORMATS["mooncake"].columns, "hash_ids"} and "mooncake" in fitting:
        return "mooncake"
    return max(fitting, key=lambda name: len(FORMATS[name].columns))


def _format(kind: str) -> type[TraceFormat]:
    if kind not in FORMATS:
        raise ConfigError(f"{kind!r} is no kind of trace: choose from {', '.join(KINDS)}")
    return FORMATS[kind]


def _parse(path: str | Path, format: TraceFormat, lines: Iterable[str]) -> Iterator[TraceEntry]:
    needed = format.columns
    rows = csv_rows(path, lines, needed) if format.is_csv else json_rows(path, lines)
    for line, row in rows:
        try:
            tenant = optional(row, "tenant", label)
            entry = format.parse(row)
            yield entry if tenant is None else replace(entry, tenant=tenant)
        except BadRow as problem:
            raise WorkloadFileError(path, f"{problem} (read as {format.name})", line) from None


def _from_zero(trace: Sequence[TraceEntry]) -> list[TraceEntry]:
    start = trace[0].arrival_s
    return [replace(entry, arrival_s=round(entry.arrival_s - start, 7)) for entry in trace]


# -- writing --------------------------------------------------------------------------------------


def write_trace(path: str | Path, kind: str, entries: Iterable[TraceEntry]) -> None:
    """Replace ``path`` by a trace. Fields that the format does not have are left out:
    ``lost_fields``.

    Hash ids are restated for the blocks of the format.

    Raises:
        ConfigError: no such kind, or blocks that cannot be restated.
        BenchmarkError: the file cannot be written.
    """
    format = _format(kind)()
    if format.block_size is not None:
        entries = with_block_size(entries, format.block_size)
    rows = [format.render(entry) for entry in entries]
    if format.is_csv:
        write_text(path, _csv_text(format, rows))
    else:
        lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
        write_text(path, "".join(f"{line}\n" for line in lines))


def _csv_text(format: TraceFormat, rows: Sequence[Mapping[str, Any]]) -> str:
    """Empty optional columns are left out: older readers go by position."""
    names = list(rows[0]) if rows else list(format.columns)
    names = [name for name in names if any(row[name] is not None for row in rows) or not rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def lost_fields(entries: Iterable[TraceEntry], kind: str) -> list[str]:
    """Return the fields of these entries that a trace of ``kind`` cannot hold."""
    holds = (
        _format(kind).holds | REQUIRED | (BLOCKS if "hash_ids" in _format(kind).holds else set())
    )
    optional = [field for field in fields(TraceEntry) if field.name not in holds]
    lost: set[str] = set()
    for entry in entries:
        lost.update(f.name for f in optional if getattr(entry, f.name) != f.default)
    if "hash_ids" in lost:
        lost.discard("block_size")
    return sorted(lost)


def with_block_size(entries: Iterable[TraceEntry], block_size: int) -> Iterator[TraceEntry]:
    """Restate hash ids for blocks of another size. Prefixes stay shared, as far as whole new blocks
    can express it.

    A block that is split has as many ids of its own. Blocks that are joined get new ids from 0, one
    for each sequence of blocks that a prompt begins with.

    Raises:
        ConfigError: neither size is a multiple of the other.
    """
    joined: dict[tuple[int, tuple[int, ...]], int] = {}
    for entry in entries:
        ids, size = entry.hash_ids, entry.block_size
        if size % block_size == 0:
            parts = size // block_size
            ids = tuple(i * parts + part for i in ids for part in range(parts))
            if parts > 1:  # the last block may have been partial
                ids = ids[: math.ceil(entry.input_len / block_size)]
        elif block_size % size == 0:
            parts, before, longer = block_size // size, -1, []
            for group in (ids[i : i + parts] for i in range(0, len(ids), parts)):
                before = joined.setdefault((before, group), len(joined))
                longer.append(before)
            ids = tuple(longer)
        elif ids:
            raise ConfigError(
                f"hash ids of {size} tokens cannot be restated for blocks of {block_size}: "
                "one must be a multiple of the other"
            )
        yield replace(entry, hash_ids=ids, block_size=block_size)


# -- requests -------------------------------------------------------------------------------------


def to_requests(
    entries: Sequence[TraceEntry],
    vocab_size: int,
    *,
    seed: int = 0,
    speedup: float = 1.0,
    max_input_len: int | None = None,
    avoid: Collection[int] = (),
) -> list[WorkloadRequest]:
    """Return requests with random prompts of the trace's lengths, which share what its prompts
    shared.

    The tokens of a block depend on ``seed`` and its hash id alone; the last block is cut to the
    length of the prompt, and tokens without a hash id are the request's own. An entry that has a
    prompt keeps it. Arrivals count from the first entry, divided by ``speedup``. Prompts longer
    than ``max_input_len`` are cut. A request has at least one token, and asks for one or more.
    ``avoid``: token ids that must not occur, such as special ones.

    Raises:
        ConfigError: the speed-up, the limit or the vocabulary is out of range.
    """
    check_replay(speedup, max_input_len)
    allowed = allowed_token_ids(vocab_size, avoid)
    blocks: dict[tuple[int, int], list[int]] = {}
    start = min((entry.arrival_s for entry in entries), default=0.0)
    requests = []
    for index, entry in enumerate(entries):
        tokens = None
        if entry.prompt is None:
            tokens = _prompt(entry, index, allowed, blocks, seed, max_input_len)
        request = WorkloadRequest(
            request_id=str(index),
            prompt=entry.prompt,
            prompt_token_ids=tokens,
            input_len=entry.input_len if tokens is None else len(tokens),
            output_len=max(1, entry.output_len),
            arrival_s=(entry.arrival_s - start) / speedup,
        )
        requests.append(request)
    return requests


def check_replay(speedup: float, max_input_len: int | None) -> None:
    """Raise ConfigError unless a trace can be replayed so fast, with prompts cut so short."""
    if not 0 < speedup < math.inf:
        raise ConfigError(f"a trace is replayed at a positive speed, not {speedup}")
    if max_input_len is not None and max_input_len < 1:
        raise ConfigError(f"prompts cannot be cut to {max_input_len} tokens: at least 1")


def _prompt(
    entry: TraceEntry,
    index: int,
    allowed: Sequence[int],
    blocks: dict[tuple[int, int], list[int]],
    seed: int,
    max_input_len: int | None,
) -> tuple[int, ...]:
    length = max(1, entry.input_len)
    if max_input_len is not None:
        length = min(length, max_input_len)
    tokens: list[int] = []
    for hash_id in entry.hash_ids[: math.ceil(length / entry.block_size)]:
        key = (hash_id, entry.block_size)
        if key not in blocks:
            blocks[key] = random_token_ids(allowed, entry.block_size, f"{seed} block {hash_id}")
        tokens += blocks[key]
    if len(tokens) < length:
        tokens += random_token_ids(allowed, length - len(tokens), f"{seed} request {index}")
    return tuple(tokens[:length])


def random_token_ids(allowed: Sequence[int], count: int, seed: str) -> list[int]:
    """Draw ``count`` of the allowed ids. A text as a seed goes through SHA-512, never through
    hash()."""
    return random.Random(seed).choices(allowed, k=count)


def allowed_token_ids(vocab_size: int, avoid: Collection[int] = ()) -> Sequence[int]:
    """Return the ids that a random prompt may have: ordinary tokens, as far as that is known."""
    if vocab_size < 1:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens has none to make prompts of")
    lowest = min(FIRST_ORDINARY_TOKEN, vocab_size // 2)
    if not avoid:
        return range(lowest, vocab_size)
    allowed = [token for token in range(lowest, vocab_size) if token not in avoid]
    if not allowed:
        raise ConfigError("no token is left to make prompts of: all are to be avoided")
    return allowed


# -- statistics -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Statistics of the numbers of tokens of prompts, or of answers."""

    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthStatistics:
        p50, p90, p99 = (percentile(lengths, percent) for percent in (50, 90, 99))
        mean = sum(lengths) / len(lengths)
        return cls(mean, min(lengths), p50, p90, p99, max(lengths))


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Statistics of a trace.

    ``requests_per_s``: gaps between arrivals over the span; None if all come at once. ``gap_cv``:
    standard deviation of the gaps over their mean: 0 is a metronome, 1 Poisson, more is bursty;
    None without two gaps, or without a span. ``shared_prefix_share``: of the prompt tokens, those
    in leading blocks that an earlier request had too: the hit rate of an unbounded prefix cache.
    None without hash ids.
    """

    count: int
    span_s: float
    requests_per_s: float | None
    gap_cv: float | None
    input_len: LengthStatistics
    output_len: LengthStatistics
    shared_prefix_share: float | None
    num_sessions: int

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def statistics(entries: Sequence[TraceEntry]) -> TraceStatistics:
    """Compute the statistics of a trace. Raises ValueError if there are no entries."""
    if not entries:
        raise ValueError("statistics of nothing")
    arrivals = sorted(entry.arrival_s for entry in entries)
    span = arrivals[-1] - arrivals[0]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    return TraceStatistics(
        count=len(entries),
        span_s=span,
        requests_per_s=len(gaps) / span if span > 0 else None,
        gap_cv=pstdev(gaps) / fmean(gaps) if len(gaps) > 1 and span > 0 else None,
        input_len=LengthStatistics.of([entry.input_len for entry in entries]),
        output_len=LengthStatistics.of([entry.output_len for entry in entries]),
        shared_prefix_share=_shared_prefix_share(entries),
        num_sessions=len({e.session_id for e in entries if e.session_id is not None}),
    )


def _shared_prefix_share(entries: Sequence[TraceEntry]) -> float | None:
    """An id stands for all blocks before it, so that a known id has its whole prefix in
    the cache."""
    total = sum(entry.input_len for entry in entries)
    if total == 0 or not any(entry.hash_ids for entry in entries):
        return None
    seen: set[tuple[int, int]] = set()
    shared = 0
    for entry in entries:
        ids = [(hash_id, entry.block_size) for hash_id in entry.hash_ids]
        num_seen = sum(1 for _ in takewhile(seen.__contains__, ids))
        shared += min(num_seen * entry.block_size, entry.input_len)
        seen.update(ids)
    return shared / total
