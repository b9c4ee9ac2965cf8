"""The decisions of serving a model, as questions in their order, each with the numbers that answer
it for this model, hardware and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from octavo.base.errors import ConfigError
from octavo.cost.layouts import fast_link_devices, has_slow_link
from octavo.cost.parallel import Parallel
from octavo.cost.prediction import Prediction
from octavo.cost.work import Span
from octavo.planner.deployment import Deployment
from octavo.planner.figures import gib, ms
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict

# Share of the usable memory that should be left for the KV cache.
_ROOMY = 0.2


@dataclass(frozen=True, slots=True)
class ServingDecision:
    """A question and its answer. ``because``: the numbers. ``then``: what follows from the
    answer."""

    question: str
    answer: bool
    because: str
    then: str

    def as_json(self) -> dict[str, str | bool]:
        return asdict(self)


def decisions(verdict: Verdict) -> list[ServingDecision]:
    """Return the decisions that apply."""
    deployment, traffic = verdict.deployment, verdict.traffic
    found = [_fits_one_device(deployment, traffic)]
    found += _gains_by_tensors(deployment, traffic)
    if deployment.num_devices > 1:
        found += [_has_fast_link(deployment), _stays_in_a_machine(deployment)]
    found.append(_waits_for_memory(verdict))
    if verdict.service is not None and verdict.service.is_stable:
        found.append(_waits_for_prompts(verdict))
    found.append(_is_short_of_cache(deployment, traffic))
    return found


def _fits_one_device(deployment: Deployment, traffic: Traffic) -> ServingDecision:
    one = replace(deployment, parallel=Parallel(), replicas=1)
    memory = one.memory
    share = max(0.0, 1 - (memory.weights_bytes + memory.kept_back_bytes) / memory.usable_bytes)
    fitting = one.max_concurrency(traffic.total_len)
    fits = share >= _ROOMY and fitting >= (traffic.concurrency or 1)
    return ServingDecision(
        "does one device hold it, with a fifth of the memory left for the KV cache?",
        fits,
        f"{gib(memory.weights_bytes)} of weights leave {share:.0%} of "
        f"{gib(memory.usable_bytes)}: {fitting:,} requests of {traffic.total_len:,} tokens",
        "one device a replica, and more replicas for more requests: nothing is cheaper"
        if fits
        else "fewer bits first, then more devices for each replica",
    )


def _gains_by_tensors(deployment: Deployment, traffic: Traffic) -> Iterator[ServingDecision]:
    """Compare what twice as many devices save in reading and computing with the communication that
    they add. Yields nothing where such a layout is impossible, or devices have no link."""
    tp = deployment.parallel.tp
    try:
        wider = replace(deployment, parallel=Parallel(tp=2 * tp), replicas=1)
        steps = [_step(each, traffic) for each in (deployment, wider)]
    except ConfigError:
        return
    (work, talk), (less_work, more_talk) = steps
    gains = work.value - less_work.value > more_talk.value - talk.value
    yield ServingDecision(
        f"does a token come sooner with each matrix on {2 * tp} devices?",
        gains,
        f"reading and computing {ms(work.value)} → {ms(less_work.value)}, "
        f"talking {ms(talk.value)} → {ms(more_talk.value)}",
        f"tp = {2 * tp} where the time between tokens matters; replicas where throughput does"
        if gains
        else f"tp = {tp} is enough",
    )


def _step(deployment: Deployment, traffic: Traffic) -> tuple[Prediction, Prediction]:
    """Cost of a step of one stream: its operations, and its communication."""
    cost = deployment.step_cost([Span(traffic.input_len, 1)])
    return cost.compute, cost.comm


def _has_fast_link(deployment: Deployment) -> ServingDecision:
    device = deployment.device
    slow = has_slow_link(device)
    bandwidth = 0.0 if device.link_bandwidth is None else device.link_bandwidth
    return ServingDecision(
        "is the link between devices fast?",
        not slow,
        f"{bandwidth / 1e9:,.0f} GB/s each way ({device.link_kind or 'none'})",
        "pipelines for throughput, fewer bits for latency"
        if slow
        else "matrices may be shared out (tp)",
    )


def _stays_in_a_machine(deployment: Deployment) -> ServingDecision:
    each = deployment.parallel.num_devices
    linked = fast_link_devices(deployment.device)
    return ServingDecision(
        "does a replica stay within one machine?",
        each <= linked,
        f"{each} devices a replica, {linked} that have fast links to each other",
        "tensors within it" if each <= linked else "pipelines across machines, tensors within",
    )


def _waits_for_memory(verdict: Verdict) -> ServingDecision:
    deployment, traffic = verdict.deployment, verdict.traffic
    streams = _streams(verdict)
    context = traffic.input_len + traffic.output_len // 2
    cost = deployment.step_cost([Span(context, 1)] * streams)
    biggest = max(cost.ops, key=lambda op: op.seconds)
    waits = cost.bound == "memory"
    return ServingDecision(
        "does a step of answers wait for memory?",
        waits,
        f"{streams} under way: {biggest.intensity:,.1f} operations a byte in {biggest.name}, and "
        f"{biggest.ridge:,.0f} would balance; {cost.bound} takes most of {ms(cost.total.value)}",
        "more streams at once, fewer bits, or speculative decoding cost little"
        if waits
        else f"what helps is less {cost.bound}: more devices, or a smaller model",
    )


def _waits_for_prompts(verdict: Verdict) -> ServingDecision:
    assert verdict.service is not None
    share = verdict.service.prefill_share
    budget = verdict.deployment.settled.max_num_batched_tokens
    return ServingDecision(
        "do prompts take most of the time?",
        share > 0.5,
        f"{share:.0%} of it, in steps of up to {budget:,} tokens",
        "share prefixes, or have prompts computed on devices of their own"
        if share > 0.5
        else "fewer tokens a step keep answers smooth, more bring the first token sooner",
    )


def _is_short_of_cache(deployment: Deployment, traffic: Traffic) -> ServingDecision:
    fitting = deployment.max_concurrency(traffic.total_len)
    slots = deployment.settled.max_num_seqs * deployment.num_groups
    return ServingDecision(
        "does the KV cache bound how many requests run at once?",
        fitting < slots,
        f"{fitting:,} requests of {traffic.total_len:,} tokens fit, and there are {slots:,} slots",
        "a KV cache of 8 bits, or a larger share of the memory"
        if fitting < slots
        else "slots (max_num_seqs) do",
    )


def _streams(verdict: Verdict) -> int:
    """Number of streams of one group of requests."""
    deployment, service = verdict.deployment, verdict.service
    if service is None or not service.is_stable:
        return 1
    return max(1, round(service.streams.value / deployment.num_groups))
