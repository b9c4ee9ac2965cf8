"""Prometheus metrics, counted as an `EngineObserver` and served at ``/metrics``.

Every quantity is measured once, in a registry of this object's own, and named when it is rendered:

    measured       octavo:prompt_tokens
    names=all      octavo:prompt_tokens_total and vllm:prompt_tokens_total (the default)
    names=octavo   octavo:prompt_tokens_total
    names=vllm     vllm:prompt_tokens_total
    names=plain    octavo_prompt_tokens_total, without colons, which some linters forbid

``metric_definitions.py`` holds the definitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.base.errors import EngineUnavailableError
from octavo.core.batch import BAD_LOGITS, DAMAGED
from octavo.core.prefix_cache import MissReason
from octavo.core.stats import StepStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.server.engine.generation import (
    EngineClient,
    EngineFacts,
    EngineObserver,
    EngineState,
    Generation,
    GenerationStats,
)
from octavo.server.watch.metric_definitions import (
    BASE_LABELS,
    FAMILIES,
    FINISH_REASONS,
    REJECTIONS,
    REPLICA_LABEL,
    MetricDefinition,
)

if TYPE_CHECKING:
    from octavo.server.engine.replicas import ReplicaSet

# Errors of octavo.runtime.sampler about a row of logits; importing it would load torch.
_NUMERIC_ERRORS = frozenset({DAMAGED, BAD_LOGITS})
MEDIA_TYPES = ("text/plain", "application/openmetrics-text")
_OPENMETRICS = f"{MEDIA_TYPES[1]}; version=1.0.0"
_VLLM_NAMES = {f"octavo:{family.name}": family.vllm_name for family in FAMILIES}


def _all_names(name: str) -> list[str]:
    vllm_name = _VLLM_NAMES.get(name)
    return [name] if vllm_name is None else [name, vllm_name]


# The names that a rendering gives a family: none, or several.
NAMINGS: Mapping[str, Callable[[str], list[str]]] = {
    "all": _all_names,
    "octavo": lambda name: [name],
    "vllm": lambda name: _all_names(name)[1:] or ([] if name.startswith("octavo:") else [name]),
    "plain": lambda name: [name.replace(":", "_")],
}


def _is_by_position(family: MetricDefinition) -> bool:
    """True if its figure is a tuple of numbers, one for each value of its label."""
    return isinstance(family.figure, str) and bool(family.labels)


class MetricFamilies:
    """The families of all metrics in a registry of their own; several models of a server share
    them, each with its name as a label.

    Args:
        has_replicas: whether metrics of engines have the label `REPLICA_LABEL`.
    """

    def __init__(self, *, has_replicas: bool = False):
        self.has_replicas = has_replicas
        self._registry = CollectorRegistry()
        self._by_name = {family.name: self._register(family) for family in FAMILIES}
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._refreshed: list[Callable[[], None]] = []

    def __getitem__(self, name: str) -> Counter | Gauge | Histogram:
        return self._by_name[name]

    def refresh_by(self, refresh: Callable[[], None]) -> None:
        """Have a function called before each rendering, to set gauges."""
        self._refreshed.append(refresh)

    def forget(self, refresh: Callable[[], None]) -> None:
        """Undo `refresh_by`."""
        self._refreshed.remove(refresh)

    def render(self, names: str = "all", accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as text, and its content type.

        Args:
            names: one of `NAMINGS`.
            accept: the request's ``Accept`` header, which may ask for the OpenMetrics format.
        """
        for refresh in self._refreshed:
            refresh()
        # The library does not cope with versions and parameters in the header.
        wants_openmetrics = MEDIA_TYPES[1] in accept
        encode, content_type = choose_encoder(_OPENMETRICS if wants_openmetrics else "")
        return encode(_Renamed(self._registry, NAMINGS[names])), content_type

    def _register(self, family: MetricDefinition) -> Counter | Gauge | Histogram:
        name, labels = f"octavo:{family.name}", (*BASE_LABELS, *family.labels)
        if family.is_of_engine and self.has_replicas:
            labels = (*BASE_LABELS, REPLICA_LABEL, *family.labels)
        if family.kind == "counter":
            return Counter(name, family.help, labels, registry=self._registry)
        if family.kind == "gauge":
            return Gauge(name, family.help, labels, registry=self._registry)
        return Histogram(name, family.help, labels, buckets=family.buckets, registry=self._registry)


class ServerMetrics(EngineObserver):
    """Metrics of requests before they reach an engine, and of HTTP; fed by `MeasuredApp`.

    Args:
        model_name: the model that they are for; "" is none, or one that is not known yet.
    """

    def __init__(self, model_name: str, families: MetricFamilies):
        self.families = families
        self._base_labels = (model_name, "0")

    def render(self, names: str = "all", accept: str = "") -> tuple[bytes, str]:
        """Return all metrics of the server as text, and its content type; see `MetricFamilies`."""
        return self.families.render(names, accept)

    def on_rejected(self, reason: str) -> None:
        self._series("admission_rejections", reason).inc()

    def on_constraint_refused(self, reason: str) -> None:
        self._series("structured_output_refusals", reason).inc()

    def on_ignored_fields(self, names: Sequence[str]) -> None:
        self._series("ignored_fields").inc(len(names))

    def on_disconnect(self) -> None:
        """A client left before its answer had ended."""
        self._series("client_disconnects").inc()

    def on_slow_reader(self) -> None:
        """A stream was cut because its client did not read it."""
        self._series("slow_readers_cut").inc()

    def on_http_response(self, route: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. ``route`` and ``method`` must be of a fixed set."""
        self._series("http_requests", route, method, str(status)).inc()
        self._observe("http_request_duration_seconds", seconds, route)

    def _series(self, name: str, *labels: str) -> Any:
        return self.families[name].labels(*self._base_labels, *labels)

    def _observe(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._series(name, *labels).observe(value)


class Metrics(ServerMetrics):
    """Prometheus metrics of one model and its engine.

    Belongs to the event loop, as all observers do. Answers that came from the response cache
    count in requests_submitted, request_success and response_cache_hits alone: nothing was
    computed for them, and their times would hide the engine's.

    Args:
        families: those that it shares with other models; by default its own.
    """

    def __init__(
        self, model_name: str, families: MetricFamilies | None = None, *, has_replicas: bool = False
    ):
        families = families or MetricFamilies(has_replicas=has_replicas)
        super().__init__(model_name, families)
        self._model_name = model_name
        self._has_replicas = families.has_replicas
        self._engine: EngineClient | None = None
        self._replicas: ReplicaSet | None = None
        self._engines: dict[int | None, _EngineSeries] = {}  # by the number of the replica
        # Requests that have a token, and whether their TTFT has been taken in.
        self._begun: dict[str, bool] = {}
        families.refresh_by(self._refresh)

        # Looking series up by their labels costs more than counting: those of the hot paths are
        # kept here, and those whose labels are known in advance exist from the start, with 0.
        self._generation_tokens = self._series("generation_tokens")
        self._inter_token_latency = self._series("inter_token_latency_seconds")
        for reason in FINISH_REASONS:
            self._series("request_success", reason)
        for miss in MissReason:
            self._series("prefix_cache_misses", miss.value)
        for reason in REJECTIONS:
            self._series("admission_rejections", reason)
        self._series("prompt_tokens_by_source", "external_kv_transfer")
        if self._has_replicas:
            for direction in ("up", "down"):
                self._series("replica_scalings", direction)
        for plain in (each for each in FAMILIES if not each.labels and not each.is_of_engine):
            self._series(plain.name)
        if not self._has_replicas:
            self._engine_of(None)

    def observe_engine(self, engine: EngineClient, replicas: ReplicaSet | None = None) -> None:
        """Read the engine's state, statistics and facts at each scrape, however long ago a step
        was; those of each of its replicas, if it is several."""
        self._engine = engine
        self._replicas = replicas

    def close(self) -> None:
        """Note that the engine has been unloaded: its gauges are 0 from now on, totals stay."""
        self.families.forget(self._refresh)
        for engine in self._engines.values():
            engine.note_unloaded()

    # -- what happens to requests ------------------------------------------------------------

    def on_submitted(self, generation: Generation) -> None:
        self._series("requests_submitted").inc()
        asked = generation.request.params.structured_outputs
        if isinstance(asked, StructuredOutputs):
            self._series("structured_output_requests", asked.kind).inc()

    def on_tool_calls(self, format_name: str, num_calls: int, malformed: Sequence[str]) -> None:
        self._series("tool_calls", format_name).inc(num_calls)
        for reason in malformed:
            self._series("malformed_tool_calls", reason).inc()

    def on_tokens(self, generation: Generation, num_tokens: int, gap: float | None) -> None:
        self._generation_tokens.inc(num_tokens)
        if gap is not None:
            self._inter_token_latency.observe(gap)
        elif generation.request.request_id not in self._begun:  # else another sample's first
            self._on_begun(generation)

    def _on_begun(self, generation: Generation) -> None:
        stats = generation.stats
        num_prompt, num_cached = stats.num_prompt_tokens, stats.num_cached_tokens
        self._series("prompt_tokens").inc(num_prompt)
        self._series("prompt_tokens_cached").inc(num_cached)
        self._series("prompt_tokens_by_source", "local_cache_hit").inc(num_cached)
        self._series("prompt_tokens_by_source", "local_compute").inc(num_prompt - num_cached)
        if stats.miss_reason:
            self._series("prefix_cache_misses", stats.miss_reason).inc()
        self._observe("request_prefill_kv_computed_tokens", num_prompt - num_cached)
        self._observe_ttft(stats)
        self._begun[generation.request.request_id] = stats.ttft is not None

    def _observe_ttft(self, stats: GenerationStats) -> None:
        self._observe("time_to_first_token_seconds", stats.ttft)
        if stats.ttft is not None and stats.predicted_ttft is not None:
            self._observe("predicted_time_to_first_token_seconds", stats.predicted_ttft)
            ratio = stats.ttft / stats.predicted_ttft
            self._observe("time_to_first_token_prediction_ratio", ratio)

    def on_finished(self, generation: Generation, reason: str) -> None:
        self._series("request_success", reason).inc()
        if generation.is_from_cache:
            self._series("response_cache_hits").inc()
            return
        if not _NUMERIC_ERRORS.isdisjoint(generation.sample_errors):
            self._series("corrupted_requests").inc()
        stats, params = generation.stats, generation.request.params
        if not self._begun.pop(generation.request.request_id, False):
            self._observe_ttft(stats)
        self._observe("request_prompt_tokens", stats.num_prompt_tokens)
        self._observe("request_generation_tokens", stats.num_output_tokens)
        self._observe("request_max_num_generation_tokens", stats.num_longest_tokens)
        self._observe("request_num_preemptions", stats.num_preemptions)
        self._observe("request_params_n", params.n)
        self._observe("request_params_max_tokens", params.max_tokens)
        self._observe("request_time_per_output_token_seconds", stats.tpot)
        self._observe("e2e_request_latency_seconds", stats.e2e)
        self._observe("request_queue_time_seconds", stats.queue_time)
        self._observe("request_prefill_time_seconds", stats.prefill_time)
        self._observe("request_decode_time_seconds", stats.decode_time)
        if stats.prefill_time is not None:
            self._observe(
                "request_inference_time_seconds", stats.prefill_time + (stats.decode_time or 0.0)
            )

    # -- what happens to the engine ----------------------------------------------------------

    def on_step(self, stats: StepStats, replica: int | None = None) -> None:
        self._engine_of(replica).note_step(stats)

    def on_engine_state(self, state: EngineState, detail: str, replica: int | None = None) -> None:
        self._engine_of(replica).note_state(state)

    def on_routed(self, replica: int) -> None:
        self._series("routed_requests", str(replica)).inc()

    def on_scaled(self, direction: str) -> None:
        self._series("replica_scalings", direction).inc()

    def on_removed(self, replica: int) -> None:
        if (engine := self._engines.pop(replica, None)) is not None:
            engine.remove()
            routed = self.families["routed_requests"]
            with contextlib.suppress(KeyError):  # nothing was sent there
                routed.remove(*self._base_labels, str(replica))

    def _engine_of(self, replica: int | None) -> _EngineSeries:
        engine = self._engines.get(replica)
        if engine is None:
            number = str(replica or 0)
            labels = (self._model_name, number) + ((number,) if self._has_replicas else ())
            engine = self._engines[replica] = _EngineSeries(self.families, labels)
        return engine

    # -- rendering ---------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Set the gauges."""
        if self._engine is not None:
            try:
                facts = self._engine.facts
            except EngineUnavailableError:  # it has never been ready
                facts = None
            if self._replicas is None:
                self._engine_of(None).show(self._engine.state, self._engine.stats, facts)
            else:
                self._series("num_requests_unplaced").set(self._replicas.num_queued_samples)
                for replica in self._replicas.replicas:
                    self._engine_of(replica.number).show(replica.state, replica.stats, facts)
        for engine in self._engines.values():
            engine.set_gauges()


class _EngineSeries:
    """The series of one engine, by figures of its steps and by its state.

    ``labels``: the values of the labels that all of them have.
    """

    def __init__(self, families: MetricFamilies, labels: tuple[str, ...]):
        self._families: Any = families
        self._labels = labels
        self._created: set[tuple[str, tuple[str, ...]]] = set()
        self._stats = StepStats.idle()
        self._facts: EngineFacts | None = None
        self._gauges = [*self._figures("gauge")]
        self._totals = [*self._figures("counter")]
        self._gauges_by_position = _figures_by_position("gauge")
        self._totals_by_position = _figures_by_position("counter")
        self._of_steps = [*self._figures("histogram")]
        for series, figure_of in (*self._gauges, *self._totals, *self._of_steps):
            if figure_of(self._stats) is not None:
                series()
        self._series("engine_restarts")
        self._series("num_requests_waiting_by_reason", "deferred").set(0)
        self._show_state(EngineState.STARTING)

    def note_step(self, stats: StepStats) -> None:
        for histogram, figure_of in self._of_steps:
            if (figure := figure_of(stats)) is not None:
                histogram().observe(figure)
        self._advance(stats)

    def note_state(self, state: EngineState) -> None:
        if state is EngineState.RESTARTING:
            self._series("engine_restarts").inc()
            self._stats = StepStats.idle()  # the totals of the next one begin at 0
        self._show_state(state)

    def show(self, state: EngineState, stats: StepStats, facts: EngineFacts | None) -> None:
        """Take in what the engine is like now."""
        self._show_state(state)
        self._advance(stats)
        if self._facts is None and facts is not None:
            self._facts = facts
            blocks = str(facts.block_size), str(facts.num_blocks)
            self._series("cache_config_info", *blocks).set(1)

    def set_gauges(self) -> None:
        for gauge, figure_of in self._gauges:
            gauge().set(figure_of(self._stats))
        for name, figures_of in self._gauges_by_position:
            for position, figure in enumerate(figures_of(self._stats)):
                self._series(name, str(position)).set(figure)

    def note_unloaded(self) -> None:
        """Set its gauges to 0: the engine was asked to end, and another may follow."""
        self._stats = StepStats.idle()
        self.set_gauges()
        for each in EngineState:
            self._series("engine_state", each.value).set(False)

    def remove(self) -> None:
        """Remove all of its series: the engine is gone."""
        for name, labels in self._created:
            self._families[name].remove(*labels)

    def _advance(self, stats: StepStats) -> None:
        """Take in newer statistics: the growth of their totals goes to the counters."""
        last, self._stats = self._stats, stats
        if stats is last:
            return
        for counter, figure_of in self._totals:
            before, now = figure_of(last), figure_of(stats)
            if now is not None and now != before:
                counter().inc(_growth(before or 0, now))
        for name, figures_of in self._totals_by_position:
            before_it = figures_of(last)
            for position, now in enumerate(figures_of(stats)):
                before = before_it[position] if position < len(before_it) else 0
                if now != before:
                    self._series(name, str(position)).inc(_growth(before, now))

    def _show_state(self, state: EngineState) -> None:
        for each in EngineState:
            self._series("engine_state", each.value).set(each is state)

    def _figures(self, kind: str) -> Iterator[tuple[Callable[[], Any], Callable[[StepStats], Any]]]:
        """Yield the series of a kind that show a figure of each step, and the functions that read
        it.

        The figure may be None. A series is created when it is first asked for.
        """
        for family in FAMILIES:
            if family.kind == kind and family.figure is not None and not _is_by_position(family):
                by_label = (
                    {(): family.figure}
                    if isinstance(family.figure, str)
                    else {(value,): figure for value, figure in family.figure.items()}
                )
                for labels, figure in by_label.items():
                    yield cache(partial(self._series, family.name, *labels)), attrgetter(figure)

    def _series(self, name: str, *labels: str) -> Any:
        values = (*self._labels, *labels)
        self._created.add((name, values))
        return self._families[name].labels(*values)


def _figures_by_position(kind: str) -> list[tuple[str, Callable[[StepStats], Sequence[float]]]]:
    """Return the families of a kind that have a value for each position, and what reads these."""
    return [
        (family.name, attrgetter(str(family.figure)))
        for family in FAMILIES
        if family.kind == kind and _is_by_position(family)
    ]


def _growth(before: float, now: float) -> float:
    """Return by how much a total has grown; in a new engine it begins at 0."""
    return now - before if now > before else now


class _Renamed(Collector):
    """A collector of a registry's families under other names, without their creation times.

    The creation times would double the series of all counters.
    """

    def __init__(self, registry: CollectorRegistry, names_of: Callable[[str], list[str]]):
        self._registry = registry
        self._names_of = names_of

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            for name in self._names_of(family.name):
                renamed = Metric(name, family.documentation, family.type)
                renamed.samples = [
                    sample._replace(name=name + sample.name[len(family.name) :])
                    for sample in family.samples
                    if not sample.name.endswith("_created")
                ]
                yield renamed
