"""The page evaluates the planner's documents as the planner itself computes: both get the same
inputs, drawn at random, and may differ by a part in 10^9."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

import pytest

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import names, spec_of
from octavo.cost.engine_profile import Limits, profile
from octavo.cost.hardware import Device
from octavo.cost.hardware_table import devices
from octavo.cost.kv import attention_ops, sequence_bytes
from octavo.cost.kv_type import kv_types
from octavo.cost.mixers import Attention, LatentAttention
from octavo.cost.mlps import DenseMlp, ExpertMlp
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of, quantizations
from octavo.cost.prediction import Prediction
from octavo.cost.work import Span
from octavo.planner import Deployment, Slo, Traffic, judge, plan
from octavo.planner.decisions import decisions
from octavo.planner.figures import gib, ms
from octavo.planner.formulas import deployment_document
from octavo.planner.money import Price, bill, owned, per_million
from octavo.planner.queueing import (
    delays_quantile,
    erlang_c,
    md1_wait,
    md1_wait_quantile,
    mmk_wait,
    mmk_wait_quantile,
)
from octavo.speculation import analysis

SEED = 17
NUM_DEPLOYMENTS = 240  # five inputs each: what fits, three steps, lengths; and traffic of some
NUM_OTHERS = 1500  # of one formula each

# -- what is asked, and what it comes to here ------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``question``: for the page. ``expected``: what it has to answer."""

    question: dict[str, Any]
    expected: Any


def deployments(draw: random.Random) -> list[Case]:
    return [*(a_deployment(draw) for _ in range(NUM_DEPLOYMENTS)), *narrow_ones(draw)]


def narrow_ones(draw: random.Random) -> Iterator[Case]:
    """About as much memory left as makes one device enough, or not; and an indexer, which few
    models have."""
    for name, device in (
        ("llama-3.1-8b", "L4"),
        ("llama-3.1-8b", "RTX 4090"),
        ("qwen3-14b", "A40"),
        ("deepseek-v3.2", "B200"),
    ):
        deployment = laid_out(spec_of(name), found_device(device), "vllm", "bfloat16", None)
        traffic = {"inputLen": 1000, "outputLen": 250, "rate": 0.5, "percentile": 95}
        yield ask(deployment, [a_step(draw)], [1250], traffic)


def a_deployment(draw: random.Random) -> Case:
    """One that can be: others are drawn again."""
    while True:
        engine = draw.choice(["octavo", "vllm", "llama.cpp"])
        precision = draw.choice([None, None, *quantizations(), "int4-g64"])
        kv = draw.choice([None, None, "fp8", "int8", "q8_0", "int4", "k8v4"])
        limits = {
            name: size(draw, most)
            for name, most in (
                ("max_num_seqs", 512),
                ("max_num_batched_tokens", 16384),
                ("max_model_len", 200_000),
            )
            if draw.random() < 0.3
        }
        device, spec = draw.choice(devices()), a_model(draw)
        layout, replicas = a_layout(draw), draw.choice([1, 1, 3])
        try:
            deployment = laid_out(spec, device, engine, precision, kv, limits, layout, replicas)
            deployment_document(deployment)
        except ConfigError:
            continue
        break
    steps = [a_step(draw) for _ in range(3)]
    lengths = [size(draw, 300_000) for _ in range(3)]
    traffic = None
    if draw.random() < 0.2:  # it takes the longest
        traffic = {"inputLen": size(draw, 4000), "outputLen": size(draw, 600)}
        traffic["rate"] = 10 ** draw.uniform(-2, 1.5)
        traffic["percentile"] = (5, 50, 99)[traffic["inputLen"] % 3]
    return ask(deployment, steps, lengths, traffic)


def laid_out(
    spec: ModelSpec,
    device: Device,
    engine: str,
    quantization: str | None,
    kv: str | None,
    limits: dict[str, int] | None = None,
    layout: tuple[int, ...] = (1, 1, 1, 1),
    replicas: int = 1,
) -> Deployment:
    chosen = profile(engine)
    precision = precision_of(spec, quantization, chosen.kv_dtype(kv))
    parallel, limited = Parallel(*layout), Limits(**(limits or {}))
    return Deployment(spec, precision, device, parallel, chosen, limited, replicas)


def ask(deployment: Deployment, steps, lengths, traffic) -> Case:
    """About a document of one replica, and how many there are; with those that decisions compare
    it with."""
    question = {
        "kind": "deployment",
        "document": told(replace(deployment, replicas=1)),
        "one": told(replace(deployment, replicas=1, parallel=Parallel())),
        "wider": told(
            replace(deployment, replicas=1, parallel=Parallel(tp=2 * deployment.parallel.tp))
        ),
        "replicas": deployment.replicas,
        "steps": [[list(map(chunk, spans)), num_steps] for spans, num_steps in steps],
        "lengths": lengths,
        "traffic": traffic,
    }
    return Case(question, expected_of(deployment, steps, lengths, traffic))


def told(deployment: Deployment) -> dict[str, Any] | None:
    try:
        return deployment_document(deployment)
    except ConfigError:
        return None


def found_device(name: str) -> Device:
    return next(each for each in devices() if each.name == name)


def a_model(draw: random.Random) -> ModelSpec:
    return spec_of(draw.choice(names())) if draw.random() < 0.75 else made_up(draw)


def a_layout(draw: random.Random) -> tuple[int, int, int, int]:
    if draw.random() < 0.4:
        return 1, 1, 1, 1
    tp, dp = draw.choice([1, 2, 4, 8, 16]), draw.choice([1, 1, 2, 8])
    return tp, draw.choice([1, 1, 2, 5]), draw.choice([1, 1, tp, dp, tp * dp]), dp


def expected_of(found: Deployment, steps, lengths, traffic) -> Any:
    longest = found.settled.max_model_len
    return {
        "devices": found.num_devices,
        "concurrency": [found.max_concurrency(length) for length in lengths],
        "holds": [
            length <= longest and found.memory.max_concurrency(length) >= 1 for length in lengths
        ],
        "steps": [expected_step(found, *step) for step in steps],
        "service": expected_service(found, traffic),
        "decisions": expected_decisions(found, traffic),
    }


def expected_step(deployment: Deployment, spans: list[Span], num_steps: int) -> Any:
    cost = deployment.steps.cost(spans, num_steps)
    return {
        "total": numbers(cost.total),
        "parts": [numbers(each) for each in (cost.compute, cost.comm, cost.overhead)],
        "ops": [[op.name, op.count, op.seconds, op.bytes, op.flops, op.bound] for op in cost.ops],
        "said": [[each.name, each.count, each.num_bytes, each.seconds] for each in cost.transfers],
        "bound": cost.bound,
    }


def expected_service(deployment: Deployment, traffic: dict[str, Any] | None) -> Any:
    if traffic is None:
        return None
    asked = Traffic(traffic["inputLen"], traffic["outputLen"], rate=traffic["rate"])
    service = deployment.serve(asked)
    latency = service.latency()
    found = [service.streams, latency.ttft, latency.tpot, latency.e2e]
    latency = service.latency(traffic["percentile"])
    found += [latency.ttft, latency.tpot, latency.e2e]
    return {
        "isStable": service.is_stable,
        "predictions": [numbers(each) for each in found],
        "prefillShare": service.prefill_share if service.is_stable else 1,
    }


def expected_decisions(deployment: Deployment, traffic: dict[str, Any] | None) -> Any:
    if traffic is None:
        return None
    asked = Traffic(traffic["inputLen"], traffic["outputLen"], rate=traffic["rate"])
    found = decisions(judge(deployment, asked, Slo()))
    return [[each.answer, each.because] for each in found]


# The numbers that decide, as octavo.planner.decisions says them.
BECAUSE: dict[str, Callable[[dict[str, Any]], str]] = {
    "one device": lambda n: (
        f"{gib(n['weightsBytes'])} of weights leave {n['share']:.0%} of "
        f"{gib(n['usableBytes'])}: {n['fitting']:,} requests of {n['length']:,} tokens"
    ),
    "tensors": lambda n: (
        f"reading and computing {ms(n['work'])} → {ms(n['lessWork'])}, "
        f"talking {ms(n['talk'])} → {ms(n['moreTalk'])}"
    ),
    "link": lambda n: f"{n['bandwidth'] / 1e9:,.0f} GB/s each way ({n['kind'] or 'none'})",
    "machine": lambda n: (
        f"{n['each']} devices a replica, {n['island']} that have fast links to each other"
    ),
    "memory": lambda n: (
        f"{n['streams']} under way: {n['intensity']:,.1f} operations a byte in {n['name']}, and "
        f"{n['ridge']:,.0f} would balance; {n['bound']} takes most of {ms(n['seconds'])}"
    ),
    "prompts": lambda n: f"{n['share']:.0%} of it, in steps of up to {n['budget']:,} tokens",
    "cache": lambda n: (
        f"{n['fitting']:,} requests of {n['length']:,} tokens fit, "
        f"and there are {n['slots']:,} slots"
    ),
}


def said(answer: Any) -> Any:
    """The page's answer, with its reasons in words."""
    if isinstance(answer, dict) and answer.get("decisions"):
        found = [[each["answer"], BECAUSE[each["id"]](each["numbers"])]
                 for each in answer["decisions"]]  # fmt: skip
        return {**answer, "decisions": found}
    return answer


def numbers(prediction: Prediction) -> list[Any]:
    ends = (prediction.value, prediction.low, prediction.high)
    return [*(None if math.isinf(end) else end for end in ends), prediction.source]


# -- formulas of their own ------------------------------------------------------------------------


def others(draw: random.Random) -> list[Case]:
    made = itertools.cycle(FORMULAS)
    return [next(made)(draw) for _ in range(NUM_OTHERS)]


def tokens(draw):
    alpha, length = draw.choice([0.0, 1.0, draw.random(), draw.random()]), draw.randint(0, 16)
    return formula("expectedTokens", [alpha, length], analysis.expected_tokens(alpha, length))


def batched(draw):
    given = [1 + 4 * draw.random(), draw.randint(1, 8), draw.randint(1, 200)]
    row, drafting = draw.random() / 20, draw.random() / 4
    step = analysis.linear_step(row)
    expected = analysis.batched_speedup(*given, step, lambda batch: drafting)
    return Case({"kind": "batched", "given": [*given, row, drafting]}, expected)


def waits(draw):
    rate, service, servers = 10 ** draw.uniform(-2, 2), 10 ** draw.uniform(-3, 0.5), size(draw, 64)
    if draw.random() < 0.7:
        rate = draw.uniform(0.02, 0.99) / service
    busy = rate * servers
    found = [md1_wait(rate, service), erlang_c(servers, busy * service)]
    found.append(mmk_wait(busy, service, servers))
    given = [rate, service, servers]
    return Case({"kind": "waits", "given": given}, [finite(each) for each in found])


def late_waits(draw):
    rate, service, servers = 10 ** draw.uniform(-2, 2), 10 ** draw.uniform(-3, 0.5), size(draw, 64)
    if draw.random() < 0.8:  # between 0.9 and 0.97 it takes long
        rate = draw.choice([0.9 * draw.random(), 0.97 + 0.03 * draw.random()]) / service
    share = draw.choice([draw.random(), 0.9, 0.99])
    mean, further = 10 ** draw.uniform(-2, 2), draw.uniform(0, 0.9)
    found = [
        md1_wait_quantile(rate, service, share),
        mmk_wait_quantile(rate * servers, service, servers, share),
        delays_quantile(mean, further, share),
        NormalDist().inv_cdf(share),
    ]
    given = [rate, service, servers, share, mean, further]
    return Case({"kind": "lateWaits", "given": given}, [finite(each) for each in found])


def bills(draw):
    rate = Prediction.around(10 ** draw.uniform(-2, 3), draw.random(), "roofline")
    given = {"inputLen": size(draw, 8000), "outputLen": size(draw, 2000)}
    given |= {"numDevices": size(draw, 64), "prefillShare": draw.random()}
    given |= {"utilization": draw.uniform(0.05, 1), "watts": draw.choice([None, 700])}
    if draw.random() < 0.5:
        low = draw.uniform(0.1, 5)
        fixed = Prediction(low * 1.5, low, low * 2, "published")
        price = Price(fixed)
    else:
        bought = (draw.uniform(500, 9000), draw.uniform(1, 5), 300, 0.2, draw.uniform(1, 1.6))
        price = owned(*bought)
    names = ("num_devices", "input_len", "output_len", "prefill_share", "utilization", "watts")
    keys = ("numDevices", "inputLen", "outputLen", "prefillShare", "utilization", "watts")
    known = {name: given[key] for name, key in zip(names, keys, strict=True)}
    found = bill(price, requests_per_second=rate, **known)
    expected = {
        "perHour": found.per_hour, "perDay": found.per_day, "perRequest": found.per_request,
        "perMillionOutputTokens": found.per_million_output_tokens,
        "perMillionTokens": found.per_million_tokens,
        "inputPerMillion": found.input_per_million,
        "outputPerMillion": found.output_per_million,
        "perMillion": per_million(price.fixed, rate),
    }  # fmt: skip
    joules = found.joules_per_output_token
    question = {"kind": "bill", "given": given, "rate": rate.as_json()}
    question |= {"fixed": price.fixed.as_json(), "running": price.running}
    return Case(
        question,
        {name: numbers(each) for name, each in expected.items()}
        | {"joules": None if joules is None else numbers(joules)},
    )


FORMULAS = (tokens, batched, waits, late_waits, bills)


def formula(name: str, given: list[Any], expected: float) -> Case:
    return Case({"kind": "formula", "name": name, "given": given}, expected)


# -- draws ----------------------------------------------------------------------------------------


def size(draw: random.Random, most: int) -> int:
    """From 1 to ``most``, of each order of magnitude as many."""
    return round(math.exp(draw.uniform(0.0, math.log(most))))


def finite(value: float) -> float | None:
    return None if math.isinf(value) else value  # as JSON has it


def made_up(draw: random.Random) -> ModelSpec:
    """Of layers of two kinds, in any order, with whatever such a part can have."""
    hidden = 64 * draw.randint(2, 100)
    kinds = [
        LayerSpec(mixers=(mixer(draw),), mlp=mlp(draw), norm_size=draw.choice([0, 2 * hidden]))
        for _ in range(2)
    ]
    ignored = draw.choice([None, ["lm_head"], ["re:.*layers.0.*", "self_attn.o_proj"]])
    return ModelSpec(
        name="made up",
        hidden_size=hidden,
        vocab_size=draw.randint(1000, 260_000),
        layers=tuple(draw.choice(kinds) for _ in range(draw.randint(1, 90))),
        tie_embeddings=draw.random() < 0.5,
        max_position=200_000,
        final_norm_size=hidden,
        learned_positions=draw.choice([0, 0, 2048]),
        head_bias=draw.random() < 0.2,
        other_params=draw.choice([0, 123_456_789]),
        dtype=draw.choice(["bfloat16", "float16", "float32"]),
        quantization=ignored and {"quant_method": "fp8", "ignore": ignored},
    )


def mixer(draw: random.Random) -> Attention | LatentAttention:
    heads = draw.choice([4, 16, 48, 80])
    if draw.random() < 0.3:
        return LatentAttention(
            heads=heads,
            kv_rank=draw.choice([256, 512]),
            nope_dim=128,
            rope_dim=draw.choice([32, 64]),
            value_dim=draw.choice([96, 128]),
            q_rank=draw.choice([None, 1536]),
            selected=draw.choice([None, None, 2048]),
        )
    head_dim = draw.choice([64, 80, 128, 256])
    return Attention(
        heads=heads,
        kv_heads=draw.choice([1, 2, 4, heads]),
        head_dim=head_dim,
        value_dim=draw.choice([0, 0, 96]),
        window=draw.choice([None, None, 128, 4096]),
        qkv_bias=draw.random() < 0.3,
        output_bias=draw.random() < 0.3,
        qk_norm_size=draw.choice([0, 2 * head_dim]),
        has_output_gate=draw.random() < 0.2,
        value_is_key=draw.random() < 0.1,
        borrows_kv=draw.random() < 0.1,
        num_sinks=draw.choice([0, heads]),
    )


def mlp(draw: random.Random) -> DenseMlp | ExpertMlp | None:
    inner, gated, bias = 32 * draw.randint(4, 600), draw.random() < 0.8, draw.random() < 0.2
    dense = DenseMlp(inner=inner, is_gated=gated, has_bias=bias)
    if (kind := draw.random()) < 0.5:
        return dense
    if kind > 0.95:
        return None
    return ExpertMlp(
        num_experts=draw.choice([8, 60, 128]),
        per_token=draw.randint(1, 8),
        inner=32 * draw.randint(4, 200),
        is_gated=gated,
        has_bias=bias,
        router_bias=draw.random() < 0.3,
        shared=draw.choice([None, dense]),
        has_shared_gate=draw.random() < 0.3,
    )


def a_step(draw: random.Random) -> tuple[list[Span], int]:
    """A batch of streams, drafts, prompts, or all of these; of streams alone, multi-step too."""
    spans: list[Span] = []
    while not spans:
        if draw.random() < 0.7:
            spans += [Span(size(draw, 100_000), 1) for _ in range(size(draw, 100))]
        if draw.random() < 0.3:
            drafted = draw.randint(1, 8)
            spans += [Span.verifying(size(draw, 9000), drafted) for _ in range(size(draw, 30))]
        if draw.random() < 0.5:
            spans += [Span(size(draw, 9000) - 1, size(draw, 8000), draw.randint(0, 1))]
    num_steps = draw.randint(2, 5) if draw.random() < 0.2 else 1
    return spans, num_steps


def chunk(span: Span) -> list[int]:
    return [span.start, span.num_tokens, int(span.num_sampled > 0), len(span.draft or ())]


# -- what the page says to it ---------------------------------------------------------------------

ANSWERS = """
(async (questions) => {
  const of = await import("/static/formulas/index.js");
  const finite = (value) => (Number.isFinite(value) ? value : null);
  const flat = ({ value, low, high, source }) => [...[value, low, high].map(finite), source];
  const step = (found, [chunks, num_steps]) => {
    const cost = found.step(chunks, num_steps);
    return {
      total: flat(cost.total),
      parts: [cost.compute, cost.communication, cost.overhead].map(flat),
      ops: cost.ops.map((op) => [op.name, op.count, op.seconds, op.bytes, op.flops, op.bound]),
      said: cost.transfers.map((each) => [each.name, each.count, each.bytes, each.seconds]),
      bound: cost.bound,
    };
  };
  const service = (found, percentile) => {
    const times = ["ttft", "tpot", "e2e"];
    const within = times.map((metric) => found.within(metric, percentile / 100));
    const means = times.map((metric) => found[metric]);
    const predictions = [found.streams, ...means, ...within].map(flat);
    return { isStable: found.isStable, predictions, prefillShare: found.prefillShare };
  };
  const kinds = {
    deployment({ document, one, wider, replicas, steps, lengths, traffic }) {
      const read = (each) => each && new of.Deployment(each);
      const all = read(document).times(replicas);
      const others = { one: read(one), wider: read(wider) };
      return {
        devices: all.numDevices,
        concurrency: lengths.map((length) => all.maxConcurrency(length)),
        holds: lengths.map((length) => all.holds(length)),
        steps: steps.map((each) => step(all, each)),
        service: traffic && service(all.service(traffic), traffic.percentile),
        decisions: traffic && of.decisions(all, others, traffic),
      };
    },
    formula: ({ name, given }) => of[name](...given),
    batched({ given: [tokens, length, batch, row, drafting] }) {
      const cost = (requests, rows) => 1 + row * (requests * rows - 1);
      return of.batchedSpeedup(tokens, length, batch, cost, () => drafting);
    },
    waits: ({ given: [rate, service, servers] }) => [
      of.md1Wait(rate, service),
      of.erlangC(servers, rate * servers * service),
      of.mmkWait(rate * servers, service, servers),
    ].map(finite),
    lateWaits: ({ given: [rate, service, servers, share, mean, further] }) => [
      of.md1WaitQuantile(rate, service, share),
      of.mmkWaitQuantile(rate * servers, service, servers, share),
      of.delaysQuantile(mean, further, share),
      of.normalQuantile(share),
    ].map(finite),
    bill({ given, rate, fixed, running }) {
      const { utilization, joulesPerOutputToken: joules, ...found } =
        of.bill({ fixed, running }, { requestsPerSecond: rate, ...given });
      const each = Object.entries({ ...found, perMillion: of.perMillion(fixed, rate) });
      const flats = Object.fromEntries(each.map(([name, value]) => [name, flat(value)]));
      return { ...flats, joules: joules && flat(joules) };
    },
  };
  return questions.map((question) => kinds[question.kind](question));
})
"""


@cache
def all_cases() -> list[Case]:
    draw = random.Random(SEED)
    return [*deployments(draw), *others(draw)]


def answers_of(page, cases: list[Case]) -> list[Any]:
    return page.js(f"{ANSWERS}({json.dumps([case.question for case in cases])})")


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """All that differ by more than a part in 10^9."""
    if isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        return [
            line
            for name in expected
            for line in differences(expected[name], found[name], f"{where}.{name}")
        ]
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return [f"{where}: {expected} {found}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for at, pair in pairs for line in differences(*pair, f"{where}[{at}]")]
    if isinstance(expected, float) and isinstance(found, (int, float)):
        is_same = math.isclose(expected, found, rel_tol=1e-9, abs_tol=1e-15)
    else:
        is_same = expected == found
    return [] if is_same else [f"{where}: {expected} here, {found} in the page"]


def test_the_page_computes_what_the_planner_computes(tab):
    tab.open()
    cases = all_cases()
    found = answers_of(tab, cases)
    wrong = [
        line
        for number, (case, answer) in enumerate(zip(cases, found, strict=True))
        for line in differences(case.expected, said(answer), f"{number} {case.question['kind']}")
    ]
    assert not wrong, "\n".join(wrong[:20]) + f"\n{len(wrong)} in all"


KINDS = """
(async (questions) => {
  const { attentionKinds } = await import("/static/pictures/attention_kinds.js");
  const world = { kvTypes: (await (await fetch("/static/data.json")).json()).kv_types };
  const bytesOf = (values) => attentionKinds.figures({ values, world }).map(({ value }) => value);
  return questions.map(bytesOf);
})
"""


def test_kinds_of_attention_keep_what_the_planner_says(tab):
    tab.open()
    draw = random.Random(SEED)
    questions = [kinds_question(draw) for _ in range(200)]
    found = tab.js(f"{KINDS}({json.dumps(questions)})")
    for values, bytes_of_kinds in zip(questions, found, strict=True):
        assert bytes_of_kinds == pytest.approx(expected_kinds(values), rel=1e-9)


def kinds_question(draw: random.Random) -> dict[str, Any]:
    return {
        "context": size(draw, 1 << 20),
        "layers": draw.randint(8, 128),
        "heads": draw.choice([8, 16, 32, 64, 128]),
        "shared": draw.choice([2, 4, 8]),
        "dim": draw.choice([64, 96, 128, 192, 256]),
        "latent": draw.choice([128, 256, 512]),
        "rope": draw.choice([32, 64, 128]),
        "window": size(draw, 32768),
        "full": draw.choice([0, 1 / 8, 1 / 4]),
        "type": draw.choice([each.name for each in kv_types()]),
    }


def expected_kinds(values: dict[str, Any]) -> list[float]:
    """Of MHA, GQA, MQA, MLA, and of GQA whose layers mostly have windows."""
    heads, dim, layers = values["heads"], values["dim"], values["layers"]
    grouped = heads // values["shared"]
    shared = [Attention(heads=heads, kv_heads=each, head_dim=dim) for each in (heads, grouped, 1)]
    latent = LatentAttention(heads=heads, kv_rank=values["latent"], nope_dim=128,
                             rope_dim=values["rope"], value_dim=128)  # fmt: skip
    full = math.floor(layers * values["full"] + 0.5)
    windowed = replace(shared[1], window=values["window"])
    kinds = [*([each] * layers for each in (*shared, latent))]
    kinds.append([shared[1]] * full + [windowed] * (layers - full))
    return [cached_bytes(mixers, values) for mixers in kinds]


def cached_bytes(mixers: list[Attention | LatentAttention], values: dict[str, Any]) -> float:
    layers = [LayerSpec(mixers=(mixer,), mlp=None, norm_size=0) for mixer in mixers]
    precision = precision_of(spec_of("llama-3.1-8b"), None, values["type"])
    return sequence_bytes(attention_ops(layers, precision), values["context"])


def test_the_picture_of_costs_says_what_its_command_says(tab):
    tab.open("pictures#cost-and-throughput")
    tab.wait_for_text(".command code", "--rate")
    rate = float(tab.text(".command code").rpartition(" ")[2])
    planned = plan("llama-3.1-8b", "h100-sxm", Traffic(1000, 250, rate=rate))
    shown = tab.js("""[...document.querySelectorAll(".figure")]
        .find((figure) => figure.innerText.startsWith("A million"))
        .querySelector(".figure-value").innerText""")
    assert planned.bill is not None
    dollars = planned.bill.per_million_output_tokens.value
    assert float(shown.removeprefix("$")) == pytest.approx(dollars, rel=0.01)


def test_questions_are_many_and_of_all_kinds():
    cases = all_cases()
    laid_out = [case.question for case in cases if case.question["kind"] == "deployment"]
    inputs = 5 * len(laid_out) + len(cases) - len(laid_out)
    assert inputs >= 2000
    services = [case.expected["service"] for case in cases[: len(laid_out)]]
    assert {True, False} == {service["isStable"] for service in services if service}
    for name in ("tp", "pp", "ep", "dp"):
        layouts = [question["document"]["rank"]["parallel"] for question in laid_out]
        assert any(layout[name] > 1 for layout in layouts), name
    kinds = {part["kind"] for each in laid_out for layer in each["document"]["model"]["layers"]
             for part in layer["mixers"]}  # fmt: skip
    assert {"Attention", "LatentAttention", "Indexer", "GatedDeltaNet", "Mamba2"} <= kinds
