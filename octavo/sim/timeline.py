"""The course of a simulation, with steps and requests as a trace for Perfetto, and series over
time."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.executor.simulated import StageSpan
from octavo.sim.replica import ReplicaStepTimes
from octavo.sim.request import SimRequest

_MICROSECONDS = 1e6
# Chrome's trace format knows processes and their threads; tracks are grouped so.
_REPLICAS, _REQUESTS = 1, 2
_MAX_POINTS = 600  # of a series, by default


class StepNote(NamedTuple):
    """Figures of one step; those of the engine are as it stood after the step."""

    replica: str
    begun: float
    ended: float
    num_seqs: int
    num_tokens: int  # computed
    num_new_tokens: int  # of answers
    running: int
    waiting: int
    kv_use: float  # share of the pool
    num_preempted: int
    stages: tuple[StageSpan, ...] = ()  # of a pipeline


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """A span of a run: rates in it, and means over its time, of all replicas together (the KV use
    is the mean of the replicas)."""

    time_s: float  # when it begins
    running: float
    waiting: float
    kv_use: float
    steps_per_s: float
    computed_tps: float
    output_tps: float


class Timeline:
    """Notes every step of a simulation: ``simulate(..., watch=timeline.note)``."""

    def __init__(self) -> None:
        self.steps: list[StepNote] = []

    def note(self, times: ReplicaStepTimes) -> None:
        step, stats = times.step, times.step.stats
        self.steps.append(
            StepNote(
                times.replica,
                times.begun,
                times.ended,
                stats.num_seqs,
                stats.num_tokens,
                sum(len(update.new_token_ids) for update in step.updates),
                stats.num_running,
                stats.num_waiting,
                stats.kv_utilisation,
                stats.num_preempted,
                times.stages,
            )
        )

    def series(
        self, makespan_s: float, span_s: float | None = None, *, max_points: int = _MAX_POINTS
    ) -> list[SeriesPoint]:
        """Return the run in spans of equal length; None for ``span_s`` makes ``max_points`` spans
        or fewer."""
        if makespan_s <= 0:
            return []
        width = span_s or _round_span(makespan_s / max_points)
        areas = [_SpanTotals() for _ in range(math.ceil(makespan_s / width))]
        by_replica: dict[str, list[StepNote]] = defaultdict(list)
        for note in self.steps:
            by_replica[note.replica].append(note)
            place = areas[min(len(areas) - 1, int(note.ended / width))]
            place.steps += 1
            place.computed += note.num_tokens
            place.output += note.num_new_tokens
        for notes in by_replica.values():
            _spread(notes, areas, width, makespan_s)
        replicas = max(1, len(by_replica))
        return [area.point(index * width, width, replicas) for index, area in enumerate(areas)]

    def trace(self, requests: Sequence[SimRequest]) -> dict[str, Any]:
        """Return the run in Chrome's trace format, which https://ui.perfetto.dev opens: a track for
        each replica with its steps, or for each of its stages, and one for each request with
        queue, prefill and decode."""
        events = [*_names(self.steps, requests), *self._step_events()]
        for request in requests:
            events.extend(_request_events(request))
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def _step_events(self) -> Iterator[dict[str, Any]]:
        ended: dict[str, float] = {}
        tracks = _tracks(self.steps)
        for note in self.steps:
            figures = {"requests": note.num_seqs, "tokens": note.num_tokens}
            name = f"{note.num_seqs} x {note.num_tokens}"
            for track, span in zip(_track_names(note), note.stages, strict=False):
                place = {"pid": _REPLICAS, "tid": tracks[track]}
                yield _span(place, name, span.begun, span.ended, figures)
            place = {"pid": _REPLICAS, "tid": tracks[_track_names(note)[-1]]}
            if not note.stages:
                begun = max(note.begun, ended.get(note.replica, 0.0))  # steps may overlap
                ended[note.replica] = note.ended
                yield _span(place, name, begun, note.ended, figures)
            state = {"running": note.running, "waiting": note.waiting}
            for counter, values in (("requests", state), ("KV", {"share": note.kv_use})):
                yield {
                    **place,
                    "ph": "C",
                    "name": f"{note.replica} {counter}",
                    "ts": note.ended * _MICROSECONDS,
                    "args": values,
                }


def series_csv(points: Iterable[SeriesPoint]) -> str:
    """Return one line for each point, with names in the first."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    names = SeriesPoint.__slots__
    writer.writerow(names)
    writer.writerows([getattr(point, name) for name in names] for point in points)
    return text.getvalue()


def trace_json(trace: dict[str, Any]) -> str:
    return json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n"


# -- series ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SpanTotals:
    """Totals of one span: counts, and figures times the seconds for which they held."""

    steps: int = 0
    computed: int = 0
    output: int = 0
    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0

    def point(self, begin: float, width: float, num_replicas: int) -> SeriesPoint:
        return SeriesPoint(
            begin,
            self.running / width,
            self.waiting / width,
            self.kv_use / width / num_replicas,
            self.steps / width,
            self.computed / width,
            self.output / width,
        )


def _spread(
    notes: Sequence[StepNote], areas: Sequence[_SpanTotals], width: float, makespan_s: float
) -> None:
    """Add the figures of each note of a replica, for the time until the next one's end."""
    for index, note in enumerate(notes):
        until = notes[index + 1].ended if index + 1 < len(notes) else makespan_s
        begin = note.ended
        while begin < until:
            place = min(len(areas) - 1, int(begin / width))
            end = until if place == len(areas) - 1 else min(until, (place + 1) * width)
            if end <= begin:  # the edge of a span, rounded
                end = until
            areas[place].running += note.running * (end - begin)
            areas[place].waiting += note.waiting * (end - begin)
            areas[place].kv_use += note.kv_use * (end - begin)
            begin = end


def _round_span(least: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least)


# -- trace ----------------------------------------------------------------------------------------


def _tracks(steps: Iterable[StepNote]) -> dict[str, int]:
    """Return a number for each replica, or for each of its stages."""
    names = {name for note in steps for name in _track_names(note)}
    return {name: index for index, name in enumerate(sorted(names))}


def _track_names(note: StepNote) -> list[str]:
    if not note.stages:
        return [note.replica]
    return [f"{note.replica} stage {index}" for index in range(len(note.stages))]


def _names(steps: Iterable[StepNote], requests: Iterable[SimRequest]) -> Iterator[dict[str, Any]]:
    def named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    yield named("process_name", _REPLICAS, 0, "replicas")
    yield named("process_name", _REQUESTS, 0, "requests")
    for name, index in _tracks(steps).items():
        yield named("thread_name", _REPLICAS, index, name)
    for request in requests:
        yield named(
            "thread_name", _REQUESTS, request.number, f"request {request.prompt.request_id}"
        )


def _request_events(request: SimRequest) -> Iterator[dict[str, Any]]:
    record = request.record
    place = {"pid": _REQUESTS, "tid": request.number}
    figures: dict[str, Any] = {"prompt": record.prompt_tokens, "answer": record.output_tokens}
    figures |= {"cached": record.cached_tokens, "replica": request.replica}
    if request.first_scheduled is None:
        yield _span(place, record.error or "queue", record.sent, record.ended, figures)
        return
    assert record.first_token is not None
    yield _span(place, "queue", record.sent, request.first_scheduled, figures)
    yield _span(place, "prefill", request.first_scheduled, record.first_token, figures)
    yield _span(place, "decode", record.first_token, record.ended, figures)


def _span(
    place: dict[str, int], name: str, begin: float, end: float, figures: dict[str, Any]
) -> dict[str, Any]:
    return {
        **place,
        "ph": "X",
        "name": name,
        "ts": begin * _MICROSECONDS,
        "dur": (end - begin) * _MICROSECONDS,
        "args": figures,
    }
