"""A deployment as JSON of numbers, from which the page computes step times, memory and cost as this
package does.

docs/planning.md has the formula of each field. ``golden`` are inputs with the results of this
package, by which another evaluation of the document can be tested.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from octavo import __version__
from octavo.cost.communication import Link, transfers
from octavo.cost.hardware import Device
from octavo.cost.kv import kv_bytes_per_token
from octavo.cost.layouts import fast_link_devices, has_slow_link
from octavo.cost.measured_steps import ROW_KNOTS, SAMPLED_KNOTS, WIDENING
from octavo.cost.op_cost import SMALL_OPS, PricedOp, priced_ops
from octavo.cost.rank_model import RankModel
from octavo.cost.step_cost import StepModel
from octavo.cost.work import RowCounts, Span, busiest_deviations
from octavo.planner.deployment import Deployment
from octavo.planner.money import Price, listed, watts_of, watts_text
from octavo.planner.page_export import efficiency_json, model_json
from octavo.planner.report import deployment_json, memory_json

SCHEMA = 3
NUM_GOLDEN = 240
_LENGTHS = (1, 15, 16, 17, 100, 1000, 4096, 4097, 10_000, 100_000)
_MANY = 1 << 20  # rows, far enough from 1 for the slope of transfers


def formulas_json(
    deployment: Deployment, price: Price | None = None, *, num_golden: int = NUM_GOLDEN
) -> dict[str, Any]:
    """Return all that steps, memory and cost of a deployment depend on, with ``golden``.

    Args:
        price: of one device; None is what it was found for.
        num_golden: steps that are computed here; the same for the same number.
    """
    return {
        **deployment_document(deployment, price),
        "golden": {
            "steps": [_golden_json(deployment.steps, case) for case in _cases(num_golden)],
            "capacity": [
                {"length": length, "max_concurrency": deployment.memory.max_concurrency(length)}
                for length in _LENGTHS
            ],
        },
    }


def deployment_document(deployment: Deployment, price: Price | None = None) -> dict[str, Any]:
    """Return the same without ``golden``: what the page evaluates.

    Raises:
        ConfigError: the model cannot be laid out so.
    """
    steps = deployment.steps
    return {
        "schema": SCHEMA,
        "octavo": __version__,
        "deployment": deployment_json(deployment),
        "model": model_json(deployment.spec),
        "precision": {
            "name": deployment.precision.name,
            "kv": deployment.precision.kv.name,
            "activation_bytes": deployment.precision.activation_bytes,
            "kv_bytes_per_token": kv_bytes_per_token(deployment.spec, deployment.precision),
        },
        "device": deployment.device.as_json(),
        "rank": _rank_json(steps.model),
        "ops": list(_ops_json(steps)),
        "communication": _communication_json(steps.model, steps.efficiency.link),
        "stages": _stages_json(deployment),
        "efficiency": efficiency_json(steps.efficiency),
        "measured": _measured_json(deployment),
        "memory": _memory_json(deployment),
        "service": {
            "num_groups": deployment.num_groups,
            "target_step_seconds": deployment.target_step_seconds,
        },
        "link": _link_json(deployment.device),
        "money": _money_json(deployment, price or listed(deployment.device)),
    }


# -- what each rank computes ----------------------------------------------------------------------


def _rank_json(model: RankModel) -> dict[str, Any]:
    """The computation of the rank with the most work."""
    return {
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_layers": model.num_layers,
        "activation_bytes": model.activation_bytes,
        "parallel": asdict(model.parallel),
        "busiest": busiest_deviations(model.parallel.ep),
        "matrices": [asdict(matrix) for matrix in model.matrices],
        "attention": [asdict(op) for op in model.attention],
    }


# -- steps ----------------------------------------------------------------------------------------


def _stages_json(deployment: Deployment) -> dict[str, Any] | None:
    """Stages of a pipeline: those that differ, and which is which."""
    pipeline, stages = deployment.pipeline, deployment.stages
    if pipeline is None or stages is None:
        return None
    kinds = list(dict.fromkeys(pipeline.stages))
    none, one = (pipeline.send_seconds(rows) for rows in (0, 1))
    return {
        "kinds": [
            {
                "rank": _rank_json(kind.model),
                "ops": list(_ops_json(kind)),
                "communication": _communication_json(kind.model, kind.efficiency.link),
            }
            for kind in kinds
        ],
        "order": [kinds.index(stage) for stage in pipeline.stages],
        "send": {"seconds": none, "seconds_per_row": one - none},
        "chunks": stages.prompt_chunks.seconds.as_json(),
    }


def _ops_json(steps: StepModel) -> Iterator[dict[str, Any]]:
    """Operations in their order: matrices, each attention by single tokens and by prompts, and
    small ops."""
    model = steps.model
    works: list[dict[str, Any]] = [
        *({"work": "matrix", "index": index} for index in range(len(model.matrices))),
        *(
            {"work": f"attention.{phase}", "index": index}
            for index in range(len(model.attention))
            for phase in ("decode", "prompt")
        ),
        {"work": "small", "index": None},
    ]
    priced = priced_ops(model, steps.device, steps.efficiency)
    for op, work in zip(priced, works, strict=True):
        yield {"name": op.name, "count": op.count, **work, **_price_json(op)}


def _price_json(op: PricedOp) -> dict[str, float | None]:
    # Only the small ops are described by their bytes for each row.
    is_small = op.name == SMALL_OPS
    return {
        "stages": op.stages,
        "bytes_per_s": op.bytes_per_s,
        "flops_per_s": op.flops_per_s,
        "bandwidth": op.bandwidth,
        "peak": op.peak,
        "launch_s": op.launch_s,
        "bytes_per_row": op.work(RowCounts(1, 1, [0])).bytes if is_small else None,
    }


def _communication_json(model: RankModel, link: Link | None) -> list[dict[str, Any]]:
    """Transfers as straight lines: a fixed time each, and a time for each row."""
    if link is None:
        return []
    found = []
    one, two, many = (
        {each.name: each for each in transfers(model, RowCounts(*rows, [0]), link)}
        for rows in ((1, 1), (1, 2), (_MANY, _MANY))
    )
    for name, transfer in one.items():
        slope = (many[name].seconds - transfer.seconds) / (_MANY - 1)
        found.append(
            {
                "name": name,
                "count": transfer.count,
                "rows": "sampled" if two[name].num_bytes > transfer.num_bytes else "tokens",
                "bytes_per_row": transfer.num_bytes,
                "seconds": transfer.seconds - slope,
                "seconds_per_row": slope,
            }
        )
    return found


def _measured_json(deployment: Deployment) -> dict[str, Any] | None:
    if deployment.measured is None or not deployment.is_measured:
        return None
    return {
        **deployment.measured.steps.as_json(),
        "row_knots": list(ROW_KNOTS),
        "sampled_knots": list(SAMPLED_KNOTS),
        "widening": WIDENING,
    }


def _link_json(device: Device) -> dict[str, Any]:
    """The link to other devices, and how many have a fast one to each other."""
    return {
        "bytes_per_s": device.link_bandwidth or 0.0,
        "kind": device.link_kind,
        "is_slow": has_slow_link(device),
        "fast_link_devices": fast_link_devices(device),
    }


# -- memory and money -----------------------------------------------------------------------------


def _memory_json(deployment: Deployment) -> dict[str, Any]:
    memory = deployment.memory
    return {
        **memory_json(memory),
        "left": memory.left.as_json(),
        "pool_bytes": memory.kv_bytes,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "keeps_windows_only": memory.keeps_windows_only,
        "step_tokens": memory.limits.max_num_batched_tokens,
        "attention": [asdict(op) for op in memory.attention],
    }


def _money_json(deployment: Deployment, price: Price | None) -> dict[str, Any]:
    return {
        "fixed_usd_per_hour": None if price is None else price.fixed.as_json(),
        "running_usd_per_hour": None if price is None else price.running,
        "watts": watts_of(deployment.device),
        "watts_text": watts_text(deployment.device),
        "num_devices": deployment.num_devices,
    }


# -- golden steps --------------------------------------------------------------------------------


def _cases(count: int) -> Iterator[tuple[list[Span], int]]:
    """Yields the chunks of a step and its number of multi-steps: of streams, of prompts, of both,
    of drafts; few and many, at short contexts and long ones. The same for the same count."""
    draws = random.Random(count)

    def decoding() -> list[Span]:
        return [Span(_length(draws), 1) for _ in range(_length(draws, 256))]

    def prompts() -> list[Span]:
        sampled = draws.randint(0, 1)
        return [Span(_length(draws) - 1, _length(draws, 8192), sampled)]

    def drafting() -> list[Span]:
        return [
            Span.verifying(_length(draws), draws.randint(1, 8)) for _ in range(_length(draws, 64))
        ]

    for number in range(count):
        kind = number % 6
        if kind == 0:
            yield decoding(), 1
        elif kind == 1:
            yield decoding()[:4], draws.randint(2, 8)
        elif kind == 2:
            yield prompts() * draws.randint(1, 3), 1
        elif kind == 3:
            yield [*decoding(), *prompts()], 1
        elif kind == 4:
            yield drafting(), 1
        else:
            yield [*drafting(), *decoding(), *prompts()], 1


def _length(draws: random.Random, most: int = 131_072) -> int:
    """Return a number from 1 to ``most``, log-uniform."""
    return round(math.exp(draws.uniform(0.0, math.log(most))))


def _golden_json(steps: StepModel, case: tuple[Sequence[Span], int]) -> dict[str, Any]:
    spans, rounds = case
    cost = steps.cost(spans, rounds)
    return {
        "chunks": [_chunk_json(span) for span in spans],
        "rounds": rounds,
        "total": cost.total.as_json(),
        "compute": cost.compute.as_json(),
        "communication": cost.comm.as_json(),
        "overhead": cost.overhead.as_json(),
        "ops": {op.name: op.seconds for op in cost.ops},
    }


def _chunk_json(span: Span) -> list[int]:
    """Start, tokens, whether one is sampled, and how many of them are drafted."""
    return [
        span.start,
        span.num_tokens,
        int(span.num_sampled > 0),
        0 if span.draft is None else len(span.draft),
    ]
