"""What is exported is enough: from the JSON alone, read as docs/planning.md says, follows what this
package computes."""

from __future__ import annotations

import json
from math import ceil, inf, log2, sqrt

import pytest
from calibrations import STEPS

from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.cost.work import Span
from octavo.planner import CalibratedSteps, Traffic, formulas_json, plan
from octavo.planner.formulas import SCHEMA

# -- the evaluator: nothing of octavo in it ------------------------------------------------------


def seen(spans, reach):
    """Keys that are read and written, and pairs of a query and a key."""

    def scores(tokens):
        growing = min(tokens, reach)
        return growing * (growing + 1) // 2 + (tokens - growing) * growing

    keys = pairs = 0
    for start, count in spans:
        end = start + count
        keys += count + min(end, count + reach - 1)
        pairs += scores(end) - scores(start)
    return keys, pairs


def passes(chunks, num_steps):
    """Rows of each pass: by single tokens, drafts and prompts, as (start, count)."""
    first = {"tokens": 0, "sampled": 0, "singles": [], "drafts": [], "prompts": []}
    for start, count, samples, drafted in chunks:
        sampled = samples * (1 + drafted)
        first["tokens"] += count
        first["sampled"] += sampled
        kind = "singles" if count == 1 else "drafts" if count == sampled else "prompts"
        first[kind].append((start, count))
    yield first
    ends = [start + count for start, count, samples, _ in chunks if samples]
    for later in range(num_steps - 1):
        singles = [(end + later, 1) for end in ends]
        number = len(ends)
        yield {"tokens": number, "sampled": number, "singles": singles, "drafts": [], "prompts": []}


def matrix_work(matrix, rows, rank):
    count = rows["sampled"] if matrix["sampled_only"] else rows["tokens"]
    if not count:
        return 0.0, 0.0
    width = (matrix["inputs"] + matrix["outputs"]) * rank["activation_bytes"]
    experts = matrix["experts"]
    if experts is None:
        num_bytes, flops = matrix["num_bytes"] + count * width, 2 * matrix["num_params"] * count
    else:
        tp, ep = rank["parallel"]["tp"], rank["parallel"]["ep"]
        tokens, total, each = count * max(1, ep // tp), experts["total"], experts["per_token"]
        uses, hit = tokens * each, total * (1 - (1 - each / total) ** tokens)
        on_rank = experts["on_rank"]

        def most(mean, left, limit):
            above = rank["busiest"] * sqrt(mean * (1 - 1 / ep) * left)
            return min(limit, max(1, mean + above))

        here = most(uses * on_rank / total, 1, uses)
        read = most(hit * on_rank / total, 1 - hit / total, min(on_rank, hit))
        num_bytes = matrix["num_bytes"] * read / on_rank + here * width
        flops = 2 * matrix["inputs"] * matrix["outputs"] * here
    return matrix["count"] * num_bytes, matrix["count"] * flops


def attention_work(op, spans, per_score):
    limits = [each for each in (op["window"], op.get("selected")) if each]
    keys, pairs = seen(spans, min(limits, default=10**12))
    states = 2 * len(spans) * op["state_bytes"]
    num_bytes = keys * op["kv_bytes_per_token"] + states
    return op["count"] * num_bytes, op["count"] * per_score * pairs


def work_of(op, rows, rank):
    if op["work"] == "matrix":
        return matrix_work(rank["matrices"][op["index"]], rows, rank)
    if op["work"] == "small":
        return rows["tokens"] * op["bytes_per_row"], 0.0
    attention = rank["attention"][op["index"]]
    if op["work"] == "attention.prompt":
        return attention_work(attention, rows["prompts"], attention["flops_per_score"])
    per_score = attention["decode_flops_per_score"]
    if per_score is None:
        per_score = attention["flops_per_score"]
    return attention_work(attention, [*rows["singles"], *rows["drafts"]], per_score)


def op_seconds(op, num_bytes, flops, efficiency):
    """The value, and what it lies between, of one rank."""
    if not (num_bytes or flops):
        return 0.0, 0.0, 0.0
    memory, compute = num_bytes / op["bytes_per_s"], flops / op["flops_per_s"]
    p = efficiency["sharpness"]
    longer, shorter = max(memory, compute), min(memory, compute)
    both = longer if p is None else longer * (1 + (shorter / longer) ** p) ** (1 / p)
    value, spread = both + op["launch_s"], 1 + efficiency["spread"]
    least = max(num_bytes / op["bandwidth"], flops / op["peak"])
    return value, min(value, max(least, value / spread)), value * spread


def measured_pass(measured, rows):
    """The same of a pass that was timed, and whether it lies beyond what was."""
    singles, drafts, prompts = (seen(rows[kind], inf) for kind in ("singles", "drafts", "prompts"))
    decode_keys = singles[0] + drafts[0]
    amounts = {"pass": 1, "decode_key": decode_keys, "prompt_key": prompts[0]}
    amounts |= {"decode_score": singles[1] + drafts[1], "prompt_score": prompts[1]}
    for name, kind, knots in (
        ("rows", "tokens", measured["row_knots"]),
        ("sampled", "sampled", measured["sampled_knots"]),
    ):
        for knot, following in zip(knots, [*knots[1:], inf], strict=True):
            amounts[f"{name}_from_{knot}"] = max(0, min(rows[kind], following) - knot)
    known = measured["seconds_of"]
    value = sum(known.get(name, 0.0) * amount for name, amount in amounts.items())
    regime = "decode" if not rows["prompts"] else "mixed" if decode_keys else "prompt"
    spreads = measured["spreads"]
    low, high = spreads.get(regime) or (
        min(each[0] for each in spreads.values()),
        max(each[1] for each in spreads.values()),
    )
    num_seqs = sum(len(rows[kind]) for kind in ("singles", "drafts", "prompts"))
    beyond = sum(
        log2(count / most)
        for count, most in (
            (rows["tokens"], measured["most_rows"]),
            (num_seqs, measured["most_seqs"]),
            (decode_keys + prompts[0], measured["most_keys"]),
        )
        if count > most
    )
    share = measured["drift"] + measured["widening"] * beyond
    return (
        (value, value * min(1, low) / (1 + share), value * max(1, high) * (1 + share)),
        "extrapolated" if beyond else "measured",
    )


TRUST = ("measured", "interpolated", "published", "roofline", "extrapolated")


def evaluate(document, chunks, num_steps):
    """A step, as ``golden`` has it."""
    efficiency, rank = document["efficiency"], document["rank"]
    ops, num_seqs = {}, 0
    compute, comm = [0.0] * 3, [0.0] * 3
    sources = [efficiency["source"], efficiency["overhead_source"]]
    for rows in passes(chunks, num_steps):
        num_seqs = max(num_seqs, sum(len(rows[k]) for k in ("singles", "drafts", "prompts")))
        own, parts, said = {}, [0.0] * 3, 0.0
        for op in document["ops"]:
            seconds = op_seconds(op, *work_of(op, rows, rank), efficiency)
            if seconds[0]:
                own[op["name"]] = own.get(op["name"], 0.0) + seconds[0]
            parts = [sum_ + op["stages"] * each for sum_, each in zip(parts, seconds, strict=True)]
        for each in document["communication"]:
            if each["rows"] == "tokens" or rows["sampled"]:
                said += each["seconds"] + rows[each["rows"]] * each["seconds_per_row"]
        spread = 1 + efficiency["spread"]
        talk = [said, said / spread, said * spread]
        if document["measured"] and rows["tokens"]:
            known, source = measured_pass(document["measured"], rows)
            sources.append(source)
            whole = parts[0] + talk[0]
            own = {name: seconds * known[0] / whole for name, seconds in own.items()}
            share = parts[0] / whole
            parts, talk = [each * share for each in known], [each * (1 - share) for each in known]
        for name, seconds in own.items():
            ops[name] = ops.get(name, 0.0) + seconds
        compute = [one + other for one, other in zip(compute, parts, strict=True)]
        comm = [one + other for one, other in zip(comm, talk, strict=True)]
    once, spread = (
        efficiency["step_s"] + num_seqs * efficiency["sequence_s"],
        1 + efficiency["overhead_spread"],
    )
    overhead = [once, once / spread, once * spread]
    found = {"compute": compute, "communication": comm, "overhead": overhead}
    found["total"] = [sum(parts) for parts in zip(*found.values(), strict=True)]
    return found, ops, max(sources, key=TRUST.index)


def max_concurrency(memory, length):
    """Sequences of so many tokens that have room at once."""
    block = memory["block_size"]
    is_uniform = all(
        not op["state_bytes"] and (op["window"] is None or not memory["keeps_windows_only"])
        for op in memory["attention"]
    )
    if is_uniform:
        return memory["num_blocks"] // ceil(length / block)
    needed = 0.0
    for op in memory["attention"]:
        kept = length
        if op["window"] is not None and memory["keeps_windows_only"]:
            kept = min(length, op["window"] - 1 + memory["step_tokens"])
        tokens = ceil(kept / block) * block
        needed += op["count"] * (tokens * op["kv_bytes_per_token"] + op["state_bytes"])
    return int(memory["pool_bytes"] // needed) if needed else 0


# -- what it comes to -----------------------------------------------------------------------------


def exported(*arguments, **choices):
    """As somebody reads it from a file, and the deployment."""
    deployment = plan(*arguments, **choices).deployment
    text = json.dumps(formulas_json(deployment), allow_nan=False)
    return json.loads(text), deployment


def check(document, chunks, num_steps, golden):
    found, ops, source = evaluate(document, chunks, num_steps)
    for name, values in found.items():
        expected = golden[name]
        ends = [expected[end] for end in ("value", "low", "high")]
        assert values == pytest.approx(ends, rel=1e-9, abs=1e-15), name
    assert ops == pytest.approx(golden["ops"], rel=1e-9)
    assert source == golden["total"]["source"]


def calibrated(name):
    return CalibratedSteps.of(STEPS, open_spec(name), find_device("epyc-genoa")[0].name)


CASES = {
    "dense": (("llama-3.1-8b", "h100-sxm"), {"engine": "vllm"}),
    "windows": (("gemma-3-12b", "rtx4090"), {"engine": "llama.cpp", "quantization": "Q4_K_M"}),
    "experts": (("mixtral-8x7b", "h100-sxm:4"), {"engine": "vllm", "tp": 2, "ep": 2}),
    "experts elsewhere": (("deepseek-v3", "h200:16"), {"engine": "vllm", "dp": 16, "ep": 16}),
    "a pipeline": (("llama-3.1-70b", "l40s:8"), {"engine": "vllm", "tp": 4, "pp": 2}),
    "states": (("qwen3-next-80b-a3b", "h100-sxm:2"), {"engine": "vllm", "tp": 2}),
    "a processor": (("qwen3-0.6b", "epyc-genoa"), {"kv_cache_dtype": "int8"}),
    "calibrated": (("qwen3-0.6b", "epyc-genoa"), {"measured": calibrated("qwen3-0.6b")}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_formulas_of_a_page_are_ours(case):
    arguments, choices = CASES[case]
    document, _ = exported(*arguments, **choices)
    golden = document["golden"]
    assert document["schema"] == SCHEMA and len(golden["steps"]) >= 200
    assert (document["measured"] is not None) == (case == "calibrated")
    for step in golden["steps"]:
        check(document, step["chunks"], step["rounds"], step)
    for each in golden["capacity"]:
        assert max_concurrency(document["memory"], each["length"]) == each["max_concurrency"]


def test_so_they_are_for_a_step_that_is_not_among_them():
    document, deployment = exported("mixtral-8x7b", "h100-sxm:2", engine="vllm", tp=2)
    spans = [Span(777, 1), Span(0, 333), Span.verifying(55, 3)]
    cost = deployment.steps.cost(spans)
    found, _, _ = evaluate(document, [[777, 1, 1, 0], [0, 333, 1, 0], [55, 4, 1, 3]], 1)
    ends = [cost.total.value, cost.total.low, cost.total.high]
    assert found["total"] == pytest.approx(ends, rel=1e-9)


def test_golden_steps_are_the_same_each_time_and_of_every_kind():
    (one, _), (other, _) = (exported("qwen3-0.6b", "l4") for _ in range(2))
    assert one == other
    steps = one["golden"]["steps"]
    assert any(step["rounds"] > 1 for step in steps)
    assert any(chunk[3] for step in steps for chunk in step["chunks"])
    assert any(not chunk[2] for step in steps for chunk in step["chunks"])
    assert max(len(step["chunks"]) for step in steps) > 200


def test_shapes_and_prices_are_told():
    document, deployment = exported("mixtral-8x7b", "h100-sxm:2", Traffic(), tp=2)
    (layers,) = document["model"]["layers"]
    assert layers["count"] == 32 and layers["mixers"][0]["kv_heads"] == 8
    assert layers["mlp"]["per_token"] == 2
    assert document["money"]["num_devices"] == 2
    assert document["money"]["fixed_usd_per_hour"]["value"] > 1
    assert document["deployment"]["tp"] == 2
    assert document["precision"]["kv_bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert document["device"]["name"] == deployment.device.name
