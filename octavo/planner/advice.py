"""Advises changes to a deployment, each judged as a plan of its own, with its gain in figures.

Nothing is advised because it is usual. A change is tried on the model, the hardware and the traffic
of the plan, and is advised only if it makes the traffic feasible, or improves figures by more than
a twentieth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.cost.work import Span
from octavo.planner.deployment import Deployment
from octavo.planner.figures import gib, ms
from octavo.planner.sizing import fewest_devices
from octavo.planner.slo import Slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict, judge
from octavo.speculation.analysis import batched_speedup, expected_tokens

# A change that brings less than this share is not worth the trouble.
LEAST_GAIN = 0.05

# Acceptance rate of draft tokens that are looked up in the request's own text, where answers copy a
# part of their prompt; and how many are drafted at once.
_ACCEPTANCE, _DRAFT_LENGTH = 0.6, 4

# Share of a device that has no other work; the rest is for memory that no allocator counts.
_UTILIZATION = 0.95

# Why a change cannot be measured with the model at hand, on this machine.
_OTHER_WEIGHTS = "it takes a model with such weights: name one with --try"
_OTHER_DEVICES = "it takes other devices"

_SHARED_PREFIX = 0.5  # of a prompt, where it begins with instructions that all have


@dataclass(frozen=True, slots=True)
class AdviceTrial:
    """A trial by which octavo's own engine can measure the gain of an advice.

    Args:
        settings: fields of `EngineArgs` that are changed.
        shared_prefix: tokens that prompts begin with, and that are in the prefix cache.
        on_text: prompts are real texts, from which tokens can be drafted.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    shared_prefix: int = 0
    on_text: bool = False


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that helps: ``what`` to do, ``why`` it matters here, and the ``gain`` in figures.

    ``trial``: how to measure that, or what a measurement would take, in words.
    """

    what: str
    why: str
    gain: str
    trial: AdviceTrial | str

    def as_json(self) -> dict[str, str]:
        return {"what": self.what, "why": self.why, "gain": self.gain}


class _Change(NamedTuple):
    """A change, and the deployment that it makes."""

    what: str
    why: str
    deployment: Deployment
    trial: AdviceTrial | str


def advise(verdict: Verdict, slo: Slo) -> list[Advice]:
    """Return the changes that help, the most helpful first."""
    found: list[tuple[float, Advice]] = []
    predicted = _predicted_only(verdict, slo)
    for change in _changes(verdict.deployment, verdict.traffic, slo):
        try:
            after = judge(change.deployment, verdict.traffic, slo)
        except ConfigError:
            continue  # such a model cannot be laid out so, or nothing is known of it
        before = verdict if change.deployment.is_measured else predicted
        worth, gain = gain_of(before, after)
        if worth > LEAST_GAIN:
            found.append((worth, Advice(change.what, change.why, gain, change.trial)))
    found += _shorter_requests(verdict)
    if verdict.service is not None and verdict.service.is_stable:
        found += _speculative_decoding(verdict)
        found += _sharing_prompts(verdict, slo)
    return [advice for _, advice in sorted(found, key=lambda pair: -pair[0])]


def _predicted_only(verdict: Verdict, slo: Slo) -> Verdict:
    """Judge the same deployment without measured steps: both sides of a change that was not
    measured are predicted in the same way."""
    if not verdict.deployment.is_measured:
        return verdict
    return judge(replace(verdict.deployment, measured=None), verdict.traffic, slo)


# -- what could be done ---------------------------------------------------------------------------


def _changes(deployment: Deployment, traffic: Traffic, slo: Slo) -> Iterator[_Change]:
    yield from _fewer_bits(deployment, traffic)
    yield from _smaller_kv(deployment, traffic)
    yield from _other_layouts(deployment)
    yield from _other_budgets(deployment)
    yield from _other_slots(deployment, traffic)
    yield from _more_memory(deployment)
    yield from _more_devices(deployment, traffic, slo)


def _fewer_bits(deployment: Deployment, traffic: Traffic) -> Iterator[_Change]:
    """Quantize the weights, which are read for every token of a small batch."""
    spec, device, held = deployment.spec, deployment.device, deployment.memory.weights_bytes
    reading = ms(held / device.memory_bandwidth)
    has_experts = any(each.experts is not None for each in deployment.steps.model.matrices)
    whole = "those that its tokens use of" if has_experts else "all of"
    why = f"a step reads {whole} the {gib(held)} of weights on a device; all of them take {reading}"
    for name in ("fp8", "int4"):
        if name == "fp8" and "fp8" not in device.peaks:
            continue  # read as 8 bits and computed in 16, as int8 would be: int4 does that better
        precision = precision_of(spec, name, deployment.precision.kv.name)
        changed = replace(deployment, precision=precision)
        if changed.memory.weights_bytes < 0.9 * held:
            yield _Change(f"quantize the weights to {name}", why, changed, _OTHER_WEIGHTS)


def _smaller_kv(deployment: Deployment, traffic: Traffic) -> Iterator[_Change]:
    """Keep the KV cache in 8 bits: more requests fit, and less is read for each."""
    precision = deployment.precision
    kv = precision_of(deployment.spec, None, deployment.profile.kv_dtype("fp8")).kv
    changed = replace(deployment, precision=replace(precision, kv=kv))
    each = deployment.memory.kv_bytes_per_token
    if changed.memory.kv_bytes_per_token < 0.9 * each:
        why = (
            f"{each / 1024:,.1f} KiB a token: {deployment.max_concurrency(traffic.total_len):,} "
            f"requests of {traffic.total_len:,} tokens fit"
        )
        trial = AdviceTrial({"kv_cache_dtype": "fp8"})
        yield _Change("keep the KV cache in fp8", why, changed, trial)


def _other_layouts(deployment: Deployment) -> Iterator[_Change]:
    """Split each matrix over twice as many of the same devices, or over half."""
    parallel, replicas = deployment.parallel, deployment.replicas
    reading = ms(deployment.memory.weights_bytes / deployment.device.memory_bandwidth)
    if replicas % 2 == 0:
        yield _Change(
            f"lay each replica out over tp = {2 * parallel.tp}, with {replicas // 2} of them",
            f"reading the weights takes {reading} of each step, and would take half",
            replace(deployment, parallel=_with_tp(parallel, 2), replicas=replicas // 2),
            _OTHER_DEVICES,
        )
    if parallel.tp % 2 == 0:
        said = ms(deployment.step_cost([Span(0, 1)]).comm.value)
        yield _Change(
            f"lay each replica out over tp = {parallel.tp // 2}, with {2 * replicas} of them",
            f"devices take {said} of each step to tell each other what they have",
            replace(deployment, parallel=_with_tp(parallel, 0.5), replicas=2 * replicas),
            _OTHER_DEVICES,
        )


def _with_tp(parallel: Parallel, factor: float) -> Parallel:
    return parallel.with_tp(int(parallel.tp * factor))


def _other_budgets(deployment: Deployment) -> Iterator[_Change]:
    """Compute more or fewer prompt tokens in a step."""
    limits = deployment.settled
    for factor in (2.0, 0.5):
        budget = max(1, int(limits.max_num_batched_tokens * factor))
        why = (
            "a longer step computes more of a prompt for each reading of the weights"
            if factor > 1
            else "a step with a piece of a prompt keeps all others waiting for their next token"
        )
        yield _Change(
            f"set max_num_batched_tokens to {budget}",
            f"{why}; it is {limits.max_num_batched_tokens}",
            deployment.limited(max_num_batched_tokens=budget),
            AdviceTrial({"max_num_batched_tokens": budget}),
        )


def _other_slots(deployment: Deployment, traffic: Traffic) -> Iterator[_Change]:
    """Change the number of slots to the requests that are asked for and fit."""
    limits, fitting = deployment.settled, deployment.max_concurrency(traffic.total_len)
    asked = traffic.concurrency or (1 if traffic.rate is None else fitting)
    each = -(-min(asked, fitting or asked) // deployment.num_groups)
    if each > limits.max_num_seqs:
        why = f"memory has room for {fitting:,} requests, and {limits.max_num_seqs} run at once"
    elif 0 < each < limits.max_num_seqs and traffic.rate is None:
        why = (
            f"{gib(deployment.memory.activations.value)} are kept for steps of "
            f"{limits.max_num_seqs} requests, and no more than {each} are under way"
        )
    else:
        return
    changed, trial = deployment.limited(max_num_seqs=each), AdviceTrial({"max_num_seqs": each})
    yield _Change(f"set max_num_seqs to {each}", why, changed, trial)


def _more_memory(deployment: Deployment) -> Iterator[_Change]:
    """Let the engine use more of a device that no other program uses."""
    memory, share = deployment.memory, deployment.settled.utilization
    if deployment.device.kind == "gpu" and share < _UTILIZATION:
        yield _Change(
            f"set gpu_memory_utilization to {_UTILIZATION}",
            f"{gib((1 - share) * memory.total_bytes)} of each device are not used",
            deployment.limited(utilization=_UTILIZATION),
            AdviceTrial({"gpu_memory_utilization": _UTILIZATION}),
        )


def _more_devices(deployment: Deployment, traffic: Traffic, slo: Slo) -> Iterator[_Change]:
    """Use as many devices as the traffic takes, where there are too few."""
    if judge(deployment, traffic, slo).is_feasible:
        return
    enough = fewest_devices(deployment, traffic, slo)
    if enough is not None:
        yield _Change(
            f"use {_devices(enough.deployment)}",
            f"{_devices(deployment)} do not do what is asked",
            enough.deployment,
            _OTHER_DEVICES,
        )
    yield from _several_at_once(deployment, traffic, slo, enough)


def _several_at_once(
    deployment: Deployment, traffic: Traffic, slo: Slo, enough: Verdict | None
) -> Iterator[_Change]:
    """Combine fewer bits of weights and KV cache with more devices: the combination that takes the
    fewest devices, and of these the one that changes least. Nothing where more devices alone
    (``enough``) are as few."""
    found: list[tuple[tuple[int, int, float], list[str], Deployment]] = []
    for changes, changed in _with_fewer_bits(deployment):
        verdict = fewest_devices(changed, traffic, slo)
        if verdict is not None:
            best = verdict.deployment
            is_other = best.num_devices != deployment.num_devices or (
                best.parallel != deployment.parallel
            )
            said = [*changes, f"use {_devices(best)}"] if is_other else changes
            place = (best.num_devices, len(changes), best.memory.weights_bytes * -1.0)
            found.append((place, said, best))
    if not found:
        return
    (num_devices, _, _), said, best = min(found, key=lambda each: each[0])
    is_better = enough is None or num_devices < enough.deployment.num_devices
    if is_better and len(said) > 1:  # one change alone has been named
        yield _Change(
            ", ".join(said[:-1]) + f" and {said[-1]}",
            "no one of these changes does what is asked on so few devices",
            best,
            _OTHER_WEIGHTS,
        )


def _with_fewer_bits(deployment: Deployment) -> Iterator[tuple[list[str], Deployment]]:
    """Yields combinations of weights and cache in fewer bits, with how each change is named."""
    spec, now = deployment.spec, deployment.precision
    caches = [("", now.kv)]
    fp8 = precision_of(spec, None, deployment.profile.kv_dtype("fp8")).kv
    if fp8 != now.kv:
        caches.append(("keep the KV cache in fp8", fp8))
    for name in ("", "fp8", "int4"):
        if name == "fp8" and "fp8" not in deployment.device.peaks:
            continue
        weights = precision_of(spec, name) if name else now
        for said, kv in caches:
            changes = [f"quantize the weights to {name}"] if name else []
            changes += [said] if said else []
            changed = replace(deployment, precision=replace(weights, kv=kv))
            is_less = changed.memory.weights_bytes < 0.9 * deployment.memory.weights_bytes
            if changes and (is_less or not name):
                yield changes, changed


def _devices(deployment: Deployment) -> str:
    """Name the devices and the layout, as in ``2 A100-80 SXM, with tp = 2``."""
    parallel = deployment.parallel
    return f"{deployment.num_devices} {deployment.device.name}, with tp = {parallel.tp}"


# -- what it would bring --------------------------------------------------------------------------


def gain_of(before: Verdict, after: Verdict) -> tuple[float, str]:
    """Return how much a change is worth (0 where it does not help), and its gain in figures."""
    if after.service is None or (before.is_feasible and not after.is_feasible):
        return 0.0, ""
    if before.service is None or not before.service.is_stable:
        worth = 10.0 if after.is_feasible else 5.0
        return (worth, f"possible: {_figures(after)}") if after.service.is_stable else (0.0, "")
    if not after.service.is_stable:
        return 0.0, ""
    worth = _log_gain(before, after)
    if after.is_feasible and not before.is_feasible:
        return 10.0 + worth, f"possible: {_figures(after)}"
    return worth, f"{_figures(before)} → {_figures(after)}"


def _log_gain(before: Verdict, after: Verdict) -> float:
    """Sum of the logarithms of the gains in requests per second and device, in latency, and, with
    less weight, in the number of requests that fit."""
    assert before.service is not None and after.service is not None
    rates = [
        each.service.requests_per_second.value / each.deployment.num_devices
        for each in (before, after)
        if each.service is not None
    ]
    times = [before.service.latency().e2e.value, after.service.latency().e2e.value]
    total = before.traffic.total_len
    fitting = [each.deployment.max_concurrency(total) for each in (before, after)]
    return (
        math.log(rates[1] / rates[0])
        + math.log(times[0] / times[1])
        + 0.2 * math.log(fitting[1] / fitting[0])
    )


def _figures(verdict: Verdict) -> str:
    service, traffic = verdict.service, verdict.traffic
    assert service is not None
    latency = service.latency()
    tokens = service.requests_per_second.value * traffic.output_len
    fitting = verdict.deployment.max_concurrency(traffic.total_len)
    return (
        f"TTFT {ms(latency.ttft.value)}, TPOT {ms(latency.tpot.value)}, "
        f"{tokens:,.0f} tokens/s, room for {fitting:,} requests"
    )


def _shorter_requests(verdict: Verdict) -> Iterator[tuple[float, Advice]]:
    """Lower the context length, where one request of the full length does not fit: most engines
    then refuse to start."""
    memory, most = verdict.deployment.memory, verdict.deployment.settled.max_model_len
    if memory.num_blocks == 0 or memory.max_concurrency(most) >= 1:
        return
    tokens = memory.longest_sequence
    yield (
        20.0,
        Advice(
            f"set max_model_len to {tokens} or less",
            f"one request of {most:,} tokens, which may come, does not fit",
            "without that most engines refuse to start",
            "there is no speed in it: octavo starts with what fits",
        ),
    )


def _speculative_decoding(verdict: Verdict) -> Iterator[tuple[float, Advice]]:
    """Use speculative decoding, if further rows of a step cost less than the tokens that they
    bring. Recurrent states rule it out: unlike keys and values, they cannot be rolled back."""
    deployment, service, traffic = verdict.deployment, verdict.service, verdict.traffic
    assert service is not None
    if any(each.state_bytes for each in deployment.steps.model.attention):
        return
    batch = max(1, round(service.streams.value / deployment.num_groups))
    context = traffic.input_len + traffic.output_len // 2

    def seconds(batch: int, rows: int) -> float:
        return deployment.step_time([Span.verifying(context, rows - 1)] * batch).value

    tokens = expected_tokens(_ACCEPTANCE, _DRAFT_LENGTH)
    speed = batched_speedup(tokens, _DRAFT_LENGTH, batch, seconds)
    if speed <= 1 + LEAST_GAIN:
        return
    rows, plain = seconds(batch, 1 + _DRAFT_LENGTH), seconds(batch, 1)
    yield (
        math.log(speed),
        Advice(
            f"draft {_DRAFT_LENGTH} tokens in each step (speculative decoding)",
            f"with {batch} under way, a step that verifies them takes {rows / plain:.2f} times as "
            "long as one that does not",
            f"{speed:.2f} × the tokens of a stream, where {_ACCEPTANCE:.0%} of the draft "
            "tokens are accepted; measure that with `octavo bench spec`",
            AdviceTrial({"spec_method": "auto"}, on_text=True),
        ),
    )


def _sharing_prompts(verdict: Verdict, slo: Slo) -> Iterator[tuple[float, Advice]]:
    """Use prefix caching, if prompts take a good part of the time; judged as traffic with shorter
    prompts."""
    service, traffic = verdict.service, verdict.traffic
    assert service is not None
    shared = int(traffic.input_len * _SHARED_PREFIX)
    less = replace(traffic, input_len=traffic.input_len - shared)
    after = judge(verdict.deployment, less, slo)
    if service.prefill_share <= 0.1 or after.service is None or not after.service.is_stable:
        return
    before_s, after_s = (each.latency().ttft.value for each in (service, after.service))
    yield (
        math.log(service.latency().e2e.value / after.service.latency().e2e.value),
        Advice(
            "have requests begin with the same text, and cache that prefix",
            f"prompts take {service.prefill_share:.0%} of the time of the device",
            f"TTFT {ms(before_s)} → {ms(after_s)}, where the first {shared:,} "
            "tokens of prompts are known",
            AdviceTrial(shared_prefix=shared),
        ),
    )
