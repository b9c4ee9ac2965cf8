"""Formats of published request traces: one class a format, one row a request.

    kind        file   time        blocks   from
    mooncake    JSONL  ms          512      Mooncake (Qin et al., FAST 2025)
    octavo      JSONL  ms          any      Mooncake's fields, and what a request may also have
    bailian     JSONL  s           16       Alibaba's Qwen traces; vLLM's "timed_trace" by default
    azure       CSV    date, 100 ns         Azure LLM inference traces, 2023 and 2024
    burstgpt    CSV    s                    BurstGPT (Wang et al., 2024), its old and new columns
    vidur       CSV    s                    Vidur's processed traces
    splitwise   CSV    s                    Splitwise's simulator

A *block* is a run of prompt tokens with one id in ``hash_ids``: requests with equal ids have equal
tokens there. An id also stands for all blocks before it, so equal ids mean a shared prefix. The
last block of a prompt may be partial.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, NamedTuple

from octavo.workload.rows import (
    BadRow,
    count,
    integer,
    label,
    number,
    optional,
    positive,
    text,
)

TICKS_PER_S = 10**7  # 100 ns, the finest that a format here has
MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Limits that one request asks for, in milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace. ``arrival_s`` counts from the trace's own start.

    ``hash_ids``: one for each ``block_size`` tokens of the prompt, equal where prompts are equal.
    ``turn``: from 1, within ``session_id``; ``think_ms``: the pause before it. ``tenant``: whose
    request it is, for fair shares; any format may have such a column. ``elapsed_s``, ``log_type``:
    how long it took, and through what it came, as BurstGPT says.
    """

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    block_size: int = MOONCAKE_BLOCK
    prompt: str | None = None
    session_id: str | None = None
    turn: int | None = None
    think_ms: float | None = None
    priority: int | None = None
    slo: ServiceLevel | None = None
    seed: int | None = None
    model: str | None = None
    log_type: str | None = None
    elapsed_s: float | None = None
    tenant: str | None = None


REQUIRED = frozenset({"arrival_s", "input_len", "output_len"})
BLOCKS = frozenset({"hash_ids", "block_size"})


Reader = Callable[[Mapping[str, Any], str], Any]


def _same(value: Any) -> Any:
    return value


class Column(NamedTuple):
    """A column, and the field of an entry that it holds.

    ``read`` takes a row and the name of the column, and raises BadRow; ``write`` takes the field.
    ``is_needed``: each row must have it.
    """

    name: str
    field: str
    read: Reader
    is_needed: bool = False
    write: Callable[[Any], Any] = _same


class TraceFormat:
    """A format of traces, which converts rows to entries and back. One object reads or writes one
    file, and may keep state about it.

    ``table``: the columns, in the order in which they are written; JSON lines leave out those that
    are None. ``columns``: those that a row must have, by which a file is recognised. ``holds``: the
    fields of an entry that survive being written. ``block_size``: the only one that the format has;
    None if it says which, or has no blocks.
    """

    name: ClassVar[str]
    is_csv: ClassVar[bool]
    table: ClassVar[tuple[Column, ...]]
    columns: ClassVar[tuple[str, ...]]
    holds: ClassVar[frozenset[str]]
    block_size: ClassVar[int | None] = None

    def __init_subclass__(cls) -> None:
        if "columns" not in vars(cls):
            cls.columns = tuple(column.name for column in cls.table if column.is_needed)
        if "holds" not in vars(cls):
            cls.holds = frozenset(column.field for column in cls.table)

    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        """Raises BadRow."""
        found = {
            column.field: column.read(row, column.name)
            for column in self.table
            if column.is_needed or row.get(column.name) is not None
        }
        return TraceEntry(**found)

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        """Return the row, its columns in the format's order."""
        values = ((column, getattr(entry, column.field)) for column in self.table)
        return {
            column.name: None if value is None else column.write(value)
            for column, value in values
            if self.is_csv or value is not None
        }


def _needed(name: str, field: str, read: Reader, write: Callable[[Any], Any] = _same) -> Column:
    return Column(name, field, read, True, write)


def _to_ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def _plain(value: float) -> float | int:
    """Return whole numbers as int: traces write them without a point, and readers may rely
    on it."""
    return int(value) if float(value).is_integer() else value


# -- JSON lines -----------------------------------------------------------------------------------


def _timestamp(ticks_per_unit: int) -> Column:
    """Return the column of times that may have fractions of their unit, down to 100 ns."""
    return _needed(
        "timestamp",
        "arrival_s",
        lambda row, name: round(number(row, name) * ticks_per_unit) / TICKS_PER_S,
        lambda seconds: _plain(_to_ticks(seconds) / ticks_per_unit),
    )


def _hash_ids(row: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = row[name]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadRow(f"{name} is not a list of whole numbers")
    return tuple(ids)


def _service_level(row: Mapping[str, Any], name: str) -> ServiceLevel:
    limits = row[name]
    known = [field.name for field in fields(ServiceLevel)]
    if not isinstance(limits, dict) or not limits.keys() <= set(known):
        raise BadRow(f"{name} is {limits!r}, not an object with {', '.join(known)}")
    return ServiceLevel(**{limit: number(limits, limit) for limit in limits})


def _limits(slo: ServiceLevel) -> dict[str, float]:
    return {name: limit for name, limit in asdict(slo).items() if limit is not None}


class OctavoTrace(TraceFormat):
    """A superset of Mooncake's lines; optional fields are left out where they are None.

    ``timestamp`` may have fractions of a millisecond, down to 100 ns.
    """

    name = "octavo"
    is_csv = False
    table = (
        _timestamp(TICKS_PER_S // 1000),
        _needed("input_length", "input_len", count),
        _needed("output_length", "output_len", count),
        Column("hash_ids", "hash_ids", _hash_ids),
        Column("block_size", "block_size", positive),
        Column("prompt", "prompt", text),
        Column("session_id", "session_id", label),
        Column("turn", "turn", count),
        Column("think_ms", "think_ms", number),
        Column("priority", "priority", integer),
        Column("seed", "seed", integer),
        Column("model", "model", text),
        Column("log_type", "log_type", text),
        Column("elapsed_s", "elapsed_s", number),
        Column("tenant", "tenant", label),
        Column("slo", "slo", _service_level, write=_limits),
    )

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        row = super().render(entry)
        if entry.block_size == MOONCAKE_BLOCK:
            del row["block_size"]
        return row


class MooncakeTrace(OctavoTrace):
    """Mooncake's format as published: four fields. Further fields of octavo's lines are read, and
    not written."""

    name = "mooncake"
    holds = REQUIRED | {"hash_ids"}
    block_size = MOONCAKE_BLOCK

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        row = super().render(entry)
        return {name: row[name] for name in (*self.columns, "hash_ids")}


class BailianTrace(TraceFormat):
    """Alibaba's format, in which a turn names the turn before it; a session is named here by the id
    of its first turn.

    Written sessions keep together, under new names.
    """

    name = "bailian"
    is_csv = False
    table = (
        _timestamp(TICKS_PER_S),
        _needed("input_length", "input_len", count),
        _needed("output_length", "output_len", count),
        Column("type", "log_type", text),
        Column("turn", "turn", count),
        Column("hash_ids", "hash_ids", _hash_ids),
    )
    columns = ("chat_id", "timestamp", "input_length", "output_length")
    holds = REQUIRED | {"hash_ids", "block_size", "turn", "log_type"}
    block_size = BAILIAN_BLOCK

    def __init__(self) -> None:
        self._sessions: dict[int, str] = {}  # of each chat_id that was read
        self._last_turns: dict[str, int] = {}  # chat_id of the turn last written, of each session
        self._num_written = 0

    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        chat, parent = integer(row, "chat_id"), optional(row, "parent_chat_id", integer)
        session = str(chat) if parent is None else self._sessions.get(parent, str(chat))
        self._sessions[chat] = session
        return replace(super().parse(row), block_size=BAILIAN_BLOCK, session_id=session)

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        chat, parent = self._num_written, -1
        self._num_written += 1
        if entry.session_id is not None:
            parent = self._last_turns.get(entry.session_id, -1)
            self._last_turns[entry.session_id] = chat
        return {"chat_id": chat, "parent_chat_id": parent, **super().render(entry)}


# -- CSV ------------------------------------------------------------------------------------------


class AzureTrace(TraceFormat):
    """Azure's format: dates with seven digits of a second's fraction; times count from the first
    row.

    The format has no time zero: a written trace begins at midnight of some day.
    """

    name = "azure"
    is_csv = True
    table = (
        _needed("TIMESTAMP", "arrival_s", lambda row, name: row[name]),
        _needed("ContextTokens", "input_len", count),
        _needed("GeneratedTokens", "output_len", count),
    )

    _DATE = re.compile(
        r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?\s*(?:Z|[+-]\d\d(?::?\d\d)?)?"
    )
    _MIDNIGHT = datetime(2000, 1, 1)

    def __init__(self) -> None:
        self._first: int | None = None

    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        ticks = self._ticks(row["TIMESTAMP"] or "")
        if self._first is None:
            self._first = ticks
        # In whole ticks up to here: the date alone would take all the digits of a float.
        return super().parse({**row, "TIMESTAMP": (ticks - self._first) / TICKS_PER_S})

    def _ticks(self, written: str) -> int:
        match = self._DATE.fullmatch(written.strip())
        try:
            if match is None:
                raise ValueError
            # Every row of a file is in the same time zone, so that only differences matter.
            since = datetime.fromisoformat(f"{match[1]} {match[2]}") - self._MIDNIGHT
        except ValueError:
            raise BadRow(
                f"TIMESTAMP is {written!r}, not a date such as 2023-11-16 18:15:46.6805900"
            ) from None
        fraction = int((match[3] or "0").ljust(7, "0")[:7])
        return (since.days * 86400 + since.seconds) * TICKS_PER_S + fraction

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        seconds, fraction = divmod(_to_ticks(entry.arrival_s), TICKS_PER_S)
        written = (self._MIDNIGHT + timedelta(seconds=seconds)).isoformat(" ")
        return {**super().render(entry), "TIMESTAMP": f"{written}.{fraction:07d}"}


class BurstGPTTrace(TraceFormat):
    """BurstGPT's format, read by the columns' names: their number and order have changed between
    releases.

    Session and elapsed time are of the newer files. A request that failed has no response tokens.
    """

    name = "burstgpt"
    is_csv = True
    table = (
        _needed("Timestamp", "arrival_s", number, _plain),
        Column("Session ID", "session_id", label),
        Column("Elapsed time", "elapsed_s", number),
        Column("Model", "model", text),
        _needed("Request tokens", "input_len", count),
        _needed("Response tokens", "output_len", count),
        Column("Log Type", "log_type", text),
    )

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        row = super().render(entry)
        log_type = row.pop("Log Type")
        return {**row, "Total tokens": entry.input_len + entry.output_len, "Log Type": log_type}


class VidurTrace(TraceFormat):
    name = "vidur"
    is_csv = True
    table = (
        _needed("arrived_at", "arrival_s", number),
        _needed("num_prefill_tokens", "input_len", count),
        _needed("num_decode_tokens", "output_len", count),
    )


class SplitwiseTrace(TraceFormat):
    """Splitwise's format. Rows are numbered; ``request_type`` 2 is a language model's. One prompt a
    row."""

    name = "splitwise"
    is_csv = True
    table = (
        _needed("arrival_timestamp", "arrival_s", number),
        _needed("prompt_size", "input_len", count),
        _needed("token_size", "output_len", count),
    )

    def __init__(self) -> None:
        self._num_written = 0

    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        if optional(row, "batch_size", count) not in (None, 1):
            raise BadRow(f"batch_size is {row['batch_size']}; only rows of one request can be read")
        return super().parse(row)

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        row = {"request_id": self._num_written, "request_type": 2, "application_id": 0}
        self._num_written += 1
        found = super().render(entry)
        row["arrival_timestamp"] = found.pop("arrival_timestamp")
        return {**row, "batch_size": 1, **found}


FORMATS: dict[str, type[TraceFormat]] = {
    format.name: format
    for format in (
        OctavoTrace,
        MooncakeTrace,
        BailianTrace,
        AzureTrace,
        BurstGPTTrace,
        VidurTrace,
        SplitwiseTrace,
    )
}
