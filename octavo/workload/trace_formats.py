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
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, ClassVar

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
ALL_FIELDS = frozenset(field.name for field in fields(TraceEntry))


class TraceFormat(ABC):
    """A format of traces, which converts rows to entries and back. One object reads or writes one
    file, and may keep state about it.

    ``columns``: those that a row must have, by which a file is recognised. ``holds``: the fields of
    an entry that survive being written. ``block_size``: the only one that the format has; None if
    it says which, or has no blocks.
    """

    name: ClassVar[str]
    is_csv: ClassVar[bool]
    columns: ClassVar[tuple[str, ...]]
    holds: ClassVar[frozenset[str]]
    block_size: ClassVar[int | None] = None

    @abstractmethod
    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        """Raises BadRow."""

    @abstractmethod
    def render(self, entry: TraceEntry) -> dict[str, Any]:
        """Return the row, its columns in the format's order."""


# -- JSON lines -----------------------------------------------------------------------------------


class OctavoTrace(TraceFormat):
    """A superset of Mooncake's lines; optional fields are left out where they are None.

    ``timestamp`` may have fractions of a millisecond, down to 100 ns.
    """

    name = "octavo"
    is_csv = False
    columns = ("timestamp", "input_length", "output_length")
    holds = ALL_FIELDS

    _AS_IT_IS = [
        field.name for field in fields(TraceEntry) if field.name not in REQUIRED | BLOCKS | {"slo"}
    ]

    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        return TraceEntry(
            arrival_s=_from_ticks(round(number(row, "timestamp") * (TICKS_PER_S // 1000))),
            input_len=count(row, "input_length"),
            output_len=count(row, "output_length"),
            hash_ids=_hash_ids(row),
            block_size=optional(row, "block_size", positive) or MOONCAKE_BLOCK,
            prompt=optional(row, "prompt", text),
            session_id=optional(row, "session_id", label),
            turn=optional(row, "turn", count),
            think_ms=optional(row, "think_ms", number),
            priority=optional(row, "priority", integer),
            slo=_service_level(row),
            seed=optional(row, "seed", integer),
            model=optional(row, "model", text),
            log_type=optional(row, "log_type", text),
            elapsed_s=optional(row, "elapsed_s", number),
        )

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        row: dict[str, Any] = {
            "timestamp": _plain(_to_ticks(entry.arrival_s) / (TICKS_PER_S // 1000)),
            "input_length": entry.input_len,
            "output_length": entry.output_len,
            "hash_ids": list(entry.hash_ids),
        }
        if entry.block_size != MOONCAKE_BLOCK:
            row["block_size"] = entry.block_size
        for name in self._AS_IT_IS:
            if (value := getattr(entry, name)) is not None:
                row[name] = value
        if entry.slo is not None:
            limits = {field.name: getattr(entry.slo, field.name) for field in fields(entry.slo)}
            row["slo"] = {name: limit for name, limit in limits.items() if limit is not None}
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
    columns = (
        "chat_id",
        "timestamp",
        "input_length",
        "output_length",
    )
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
        return TraceEntry(
            arrival_s=_from_ticks(round(number(row, "timestamp") * TICKS_PER_S)),
            input_len=count(row, "input_length"),
            output_len=count(row, "output_length"),
            hash_ids=_hash_ids(row),
            block_size=BAILIAN_BLOCK,
            session_id=session,
            turn=optional(row, "turn", count),
            log_type=optional(row, "type", text),
        )

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        chat, parent = self._num_written, -1
        self._num_written += 1
        if entry.session_id is not None:
            parent = self._last_turns.get(entry.session_id, -1)
            self._last_turns[entry.session_id] = chat
        row = {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": _plain(_to_ticks(entry.arrival_s) / TICKS_PER_S),
            "input_length": entry.input_len,
            "output_length": entry.output_len,
            "type": entry.log_type,
            "turn": entry.turn,
            "hash_ids": list(entry.hash_ids),
        }
        return {name: value for name, value in row.items() if value is not None}


# -- CSV ------------------------------------------------------------------------------------------


class AzureTrace(TraceFormat):
    """Azure's format: dates with seven digits of a second's fraction; times count from the first
    row.

    The format has no time zero: a written trace begins at midnight of some day.
    """

    name = "azure"
    is_csv = True
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    holds = REQUIRED

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
        return TraceEntry(
            # In whole ticks up to here: the date alone would take all the digits of a float.
            arrival_s=_from_ticks(ticks - self._first),
            input_len=count(row, "ContextTokens"),
            output_len=count(row, "GeneratedTokens"),
        )

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
        return dict(
            zip(
                self.columns,
                (f"{written}.{fraction:07d}", entry.input_len, entry.output_len),
                strict=True,
            )
        )


class BurstGPTTrace(TraceFormat):
    """BurstGPT's format, read by the columns' names: their number and order have changed between
    releases.

    Session and elapsed time are of the newer files. A request that failed has no response tokens.
    """

    name = "burstgpt"
    is_csv = True
    columns = ("Timestamp", "Request tokens", "Response tokens")
    holds = REQUIRED | {"session_id", "elapsed_s", "model", "log_type"}

    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        return TraceEntry(
            arrival_s=number(row, "Timestamp"),
            input_len=count(row, "Request tokens"),
            output_len=count(row, "Response tokens"),
            session_id=optional(row, "Session ID", label),
            elapsed_s=optional(row, "Elapsed time", number),
            model=optional(row, "Model", text),
            log_type=optional(row, "Log Type", text),
        )

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        return {
            "Timestamp": _plain(entry.arrival_s),
            "Session ID": entry.session_id,
            "Elapsed time": entry.elapsed_s,
            "Model": entry.model,
            "Request tokens": entry.input_len,
            "Response tokens": entry.output_len,
            "Total tokens": entry.input_len + entry.output_len,
            "Log Type": entry.log_type,
        }


class VidurTrace(TraceFormat):
    name = "vidur"
    is_csv = True
    columns = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
    holds = REQUIRED

    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        return TraceEntry(
            arrival_s=number(row, "arrived_at"),
            input_len=count(row, "num_prefill_tokens"),
            output_len=count(row, "num_decode_tokens"),
        )

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        values = (entry.arrival_s, entry.input_len, entry.output_len)
        return dict(zip(self.columns, values, strict=True))


class SplitwiseTrace(TraceFormat):
    """Splitwise's format. Rows are numbered; ``request_type`` 2 is a language model's. One prompt a
    row."""

    name = "splitwise"
    is_csv = True
    columns = ("arrival_timestamp", "prompt_size", "token_size")
    holds = REQUIRED

    def __init__(self) -> None:
        self._num_written = 0

    def parse(self, row: Mapping[str, Any]) -> TraceEntry:
        if optional(row, "batch_size", count) not in (None, 1):
            raise BadRow(f"batch_size is {row['batch_size']}; only rows of one request can be read")
        return TraceEntry(
            arrival_s=number(row, "arrival_timestamp"),
            input_len=count(row, "prompt_size"),
            output_len=count(row, "token_size"),
        )

    def render(self, entry: TraceEntry) -> dict[str, Any]:
        number_of_row = self._num_written
        self._num_written += 1
        return {
            "request_id": number_of_row,
            "request_type": 2,
            "application_id": 0,
            "arrival_timestamp": entry.arrival_s,
            "batch_size": 1,
            "prompt_size": entry.input_len,
            "token_size": entry.output_len,
        }


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


# -- fields that several formats have -----------------------------------------------------------


def _hash_ids(row: Mapping[str, Any]) -> tuple[int, ...]:
    ids = row.get("hash_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadRow("hash_ids is not a list of whole numbers")
    return tuple(ids)


def _service_level(row: Mapping[str, Any]) -> ServiceLevel | None:
    limits = row.get("slo")
    if limits is None:
        return None
    known = [field.name for field in fields(ServiceLevel)]
    if not isinstance(limits, dict) or not limits.keys() <= set(known):
        raise BadRow(f"slo is {limits!r}, not an object with {', '.join(known)}")
    return ServiceLevel(**{name: number(limits, name) for name in limits})


def _to_ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def _from_ticks(ticks: int) -> float:
    return ticks / TICKS_PER_S


def _plain(value: float) -> float | int:
    """Return whole numbers as int: traces write them without a point, and readers may rely
    on it."""
    return int(value) if float(value).is_integer() else value
