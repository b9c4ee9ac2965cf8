"""The plan of a model on some hardware, with its speed, concurrency and cost, what binds, what to
change, and how certain that is.

Nothing is loaded or started; only the shape of the model is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.base.renamed import RenamedAttribute
from octavo.cost.engine_profile import Limits, profile
from octavo.cost.find_device import asked_ranks, find_device, ranks_of
from octavo.cost.hardware import Device
from octavo.cost.model_spec import ModelSpec
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.cost.prediction import Prediction
from octavo.cost.step_cost import StepCost
from octavo.cost.work import Span
from octavo.planner.deployment import CalibratedSteps, Deployment
from octavo.planner.latency import (
    ServiceEstimate,
    Stages,
    decode_time,
    prefill_time,
    prompt_chunks,
)
from octavo.planner.money import USUAL_UTILIZATION, Bill, Price, bill, listed, watts_of
from octavo.planner.sizing import best_layout, highest_rate
from octavo.planner.slo import Slo, parse_slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict, judge

if TYPE_CHECKING:
    from octavo.planner.advice import Advice
    from octavo.planner.feasible_alternatives import FeasibleAlternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question that a plan answers. A field that is None is chosen, or takes the usual value.

    Args:
        hardware: a device and how many, as `octavo.cost.find_device.find_device` reads them.
        hardware_file: devices of one's own, beside those of the table.
        tp, pp, ep, dp: the layout; where none is given, the best one over all of the devices is
            taken; a tp of "auto" is one rank for each processor, or NUMA node of this machine.
        dp_attention: the tp devices attend for requests of their own; where a layout is given.
        slo: see `octavo.planner.slo.parse_slo`.
        engine: whose rules of memory and overheads hold; see `octavo.cost.engine_profile`.
        limits: of the engine.
        price: of one device; None is what it was found for.
        utilization: share of its capacity at which it works, for the cost. Where a rate is
            given, it follows from that.
        measured: step times of this model; they are used where the plan is of the configuration
            that was measured.
    """

    model: str | ModelSpec
    hardware: str = "auto"
    hardware_file: str | None = None
    traffic: Traffic = field(default_factory=Traffic)
    tp: int | str | None = None
    pp: int | None = None
    ep: int | None = None
    dp: int | None = None
    dp_attention: bool = False
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    slo: str | Slo | None = None
    engine: str = "octavo"
    limits: Limits = field(default_factory=Limits)
    price: Price | None = None
    utilization: float | None = None
    measured: CalibratedSteps | None = None

    @property
    def parallel(self) -> Parallel | None:
        """The layout that was given; None where it is to be chosen."""
        degrees = (self.tp if isinstance(self.tp, int) else None, self.pp, self.ep, self.dp)
        if all(degree is None for degree in degrees):
            if self.dp_attention:
                raise ConfigError("dp_attention is of devices that share each layer: give tp")
            return None
        given = (1 if degree is None else degree for degree in degrees)
        return Parallel(*given, dp_attention=self.dp_attention)

    @property
    def spec(self) -> ModelSpec:
        """The shape of the model; nothing is fetched."""
        return self.model if isinstance(self.model, ModelSpec) else open_spec(self.model)

    @property
    def limits_of_answers(self) -> Slo:
        if self.slo is None:
            return Slo()
        return parse_slo(self.slo) if isinstance(self.slo, str) else self.slo


def plan(
    model: str | ModelSpec, hardware: str = "auto", traffic: Traffic | None = None, **choices: Any
) -> Plan:
    """Return the plan of a model on some hardware.

    Args:
        model: a name of the catalogue, a model that is here, a ``config.json``, folder or GGUF.
        choices: other fields of `Question`.

    Raises:
        ConfigError: a value is not possible, or contradicts another one; for unknown names,
            similar known ones are told.
        ModelError: a file of the model is damaged, or of an unknown kind.
    """
    return answer(Question(model=model, hardware=hardware, traffic=traffic or Traffic(), **choices))


def answer(question: Question) -> Plan:
    """Return the plan that answers a question; see `plan`."""
    slo, traffic = question.limits_of_answers, question.traffic
    if question.utilization is not None and traffic.rate is not None:
        raise ConfigError(
            "utilization follows from the rate: give one of them, or concurrency in place of rate"
        )
    device, count = find_device(question.hardware, question.hardware_file)
    tp = asked_ranks(question.tp, device, count)
    question = replace(question, tp=tp)
    if (asked := question.parallel) is not None:
        device, count = ranks_of(device, count, asked.num_devices)
    base = deployment_of(question, question.spec, device, question.quantization)
    if question.parallel is None and count > 1:
        return Plan(question, best_layout(base, count, traffic, slo), slo)
    if ":" in question.hardware:
        base = replace(base, replicas=_replicas(count, base.parallel))
    return Plan(question, judge(base, traffic, slo), slo)


def deployment_of(
    question: Question, spec: ModelSpec, device: Device, quantization: str | None
) -> Deployment:
    """Return one replica as the question asks for it, on some device and with some weights."""
    engine = profile(question.engine)
    kv_cache_dtype = engine.kv_dtype(question.kv_cache_dtype)
    return Deployment(
        spec,
        precision_of(spec, quantization, kv_cache_dtype, question.dtype),
        device,
        question.parallel or Parallel(),
        engine,
        question.limits,
        measured=question.measured,
    )


def _replicas(count: int, parallel: Parallel) -> int:
    if count % parallel.num_devices:
        raise ConfigError(
            f"{count} devices do not make replicas of {parallel.num_devices}, which tp = "
            f"{parallel.tp}, pp = {parallel.pp} and dp = {parallel.dp} take"
        )
    return count // parallel.num_devices


@dataclass(frozen=True)
class Plan:
    """The answer to a question. Figures that do not exist, such as the latency of a model that does
    not fit, are None."""

    question: Question
    verdict: Verdict
    slo: Slo

    nearest = RenamedAttribute("feasible_alternatives")

    @property
    def is_feasible(self) -> bool:
        return self.verdict.is_feasible

    @property
    def deployment(self) -> Deployment:
        return self.verdict.deployment

    @property
    def traffic(self) -> Traffic:
        return self.verdict.traffic

    @property
    def service(self) -> ServiceEstimate | None:
        """The latency and throughput of the traffic, if all of it is answered."""
        service = self.verdict.service
        return service if service is not None and service.is_stable else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Remarks on the files of the model, on the engine, and on requests that wait."""
        spec, others = self.deployment.spec, self._of_the_engine()
        if self.question.quantization is not None or spec.source is not None:
            return (*spec.notes, *others)
        from octavo.cost.quantization_config import notes

        return (*spec.notes, *notes(spec), *others)

    def _of_the_engine(self) -> Iterator[str]:
        """Yields remarks on devices that the engine does not run on, and on requests that wait."""
        deployment, traffic = self.deployment, self.traffic
        engine, device = deployment.profile.name, deployment.device
        if engine == "octavo" and (reason := deployment.spec.why_not_run) is not None:
            yield f"{reason}: the figures are those that it would have"
        if not deployment.profile.runs_on(device):
            yield (
                f"{engine} does not run on {device.name}: the figures are those that it would have "
                "there; --profile names an engine that does"
            )
        places = deployment.slots(traffic.total_len).max_num_seqs * deployment.num_groups
        asked = traffic.concurrency or 1
        if traffic.rate is None and self.service is not None and places < asked:
            ttft = self.service.latency(99).ttft.value
            yield (
                f"{places:,} of the {asked:,} requests run at once, and the others wait for one of "
                f"them to end: the 99th percentile of TTFT, {ttft:,.1f} s, has that wait in it"
            )

    # -- steps -------------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """Number of requests in a decode step: those that are asked for, or that fit."""
        deployment = self.deployment
        most = deployment.slots(self.traffic.total_len).max_num_seqs
        return max(1, min(most, math.ceil(self._under_way / deployment.num_groups)))

    @property
    def _under_way(self) -> float:
        """Number of requests that are answered at once, on the mean."""
        if self.service is not None and self.traffic.rate is not None:
            return self.service.streams.value
        return self.traffic.concurrency or 1

    @property
    def prefill(self) -> Prediction:
        """Seconds of a prompt alone."""
        step_time = self.deployment.step_time
        return prefill_time(step_time, self.traffic.input_len, *self._prompt_steps)

    @property
    def decode_step(self) -> Prediction:
        """Seconds of a step of all streams, half way to their ends; in a pipeline, until their next
        one."""
        deployment = self.deployment
        seconds = decode_time(deployment.step_time, self.streams, self._context)
        if deployment.stages is None:
            return seconds
        times = deployment.stages.times([Span(self._context - 1, 1)] * self.streams)
        of_copy = self._under_way / (deployment.replicas * deployment.parallel.dp)
        return seconds * (times.period(max(1.0, of_copy)) / times.period())

    @cached_property
    def prefill_cost(self) -> StepCost:
        """Cost of the first step of a prompt alone, by operation."""
        first, *_ = prompt_chunks(self.traffic.input_len, *self._prompt_steps)
        return self.deployment.step_cost([first])

    @property
    def _prompt_steps(self) -> tuple[int, Stages | None]:
        """Tokens of a step, and stages of a pipeline."""
        return self.deployment.settled.max_num_batched_tokens, self.deployment.stages

    @cached_property
    def decode_cost(self) -> StepCost:
        """Cost of a step of all streams, half way to their ends, by operation."""
        return self.deployment.step_cost([Span(self._context - 1, 1)] * self.streams)

    @property
    def _context(self) -> int:
        return self.traffic.input_len + self.traffic.output_len // 2

    # -- money -------------------------------------------------------------------------------

    @cached_property
    def capacity(self) -> Prediction | None:
        """Requests per second that are answered at most, limits or not: the highest stable rate, or
        the throughput of the requests that begin together."""
        service = self.service
        if service is None:
            return None
        if self.traffic.rate is None:
            return service.requests_per_second
        most = max(self.traffic.rate, highest_rate(self.deployment, self.traffic, Slo()))
        step = self.decode_step  # the longer it takes, the fewer there are
        return Prediction(
            most, most * step.value / step.high, most * step.value / step.low, step.source
        )

    @cached_property
    def bill(self) -> Bill | None:
        """The cost; None where nothing is answered, or no price is known."""
        capacity, device = self.capacity, self.deployment.device
        price = self.question.price or listed(device)
        if capacity is None or price is None or self.service is None:
            return None
        return bill(
            price,
            self.deployment.num_devices,
            capacity,
            self.traffic.input_len,
            self.traffic.output_len,
            self.service.prefill_share,
            self._utilization(capacity),
            watts_of(device),
        )

    def _utilization(self, capacity: Prediction) -> float:
        if self.traffic.rate is not None:
            return min(1.0, self.traffic.rate / capacity.value)
        return self.question.utilization or USUAL_UTILIZATION

    # -- what to change: imported where it is asked for, as plans themselves do not need it --

    @cached_property
    def advice(self) -> list[Advice]:
        from octavo.planner.advice import advise

        return advise(self.verdict, self.slo)

    @cached_property
    def feasible_alternatives(self) -> FeasibleAlternatives | None:
        """Traffic, limits and sizes that are feasible instead; None where the plan is."""
        from octavo.planner.feasible_alternatives import feasible_alternatives

        return None if self.is_feasible else feasible_alternatives(self.verdict, self.slo)
