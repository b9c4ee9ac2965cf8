"""Ranks that add up their results, as threads of one process; tensors go over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fused_models import MAX_LEN, MAX_ROWS, Step, kv_cache_of

from octavo.kernels.cuda.device_group import ALONE, DeviceGroup, NcclGroup
from octavo.kernels.cuda.packing import pack
from octavo.kernels.cuda.plain_ops import PlainOps
from octavo.kernels.cuda.products import multiply_in_blocks
from octavo.kernels.cuda.program import FusedProgram
from octavo.kernels.parts import Part
from octavo.models.config import ModelConfig
from octavo.runtime.op_program import plan_step
from octavo.runtime.sum_plan import divide

CPU = torch.device("cpu")
Result = TypeVar("Result")


def in_ranks(size: int, work: Callable[[DeviceGroup], Result]) -> list[Result]:
    """Have ``size`` ranks work at the same time, and return their results in order."""
    if size == 1:
        return [work(ALONE)]
    store, results, failures = dist.HashStore(), {}, []

    def run(rank: int) -> None:
        try:
            group = NcclGroup(store, rank, size, CPU)
        except BaseException as error:
            failures.append(error)
            return
        try:
            with torch.inference_mode():
                results[rank] = work(group)
        except BaseException as error:
            failures.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]


def rank_program(
    config: ModelConfig,
    model: Any,
    group: DeviceGroup,
    *,
    is_canonical: bool = False,
    dtype: torch.dtype = torch.float32,
    max_tokens: int = 64,
) -> FusedProgram:
    """Return the program of one rank, on plain ops."""
    plan, weights, layers, _ = divide(
        *plan_step(model), config.kv_layers, Part(group.rank, group.size), is_canonical
    )
    made: dict[tuple[str, ...], Any] = {}

    def weight_of(matrices: Sequence[Any]) -> Any:
        names = tuple(map(plan.name_of, matrices))
        if names not in made:
            made[names] = pack([weights[name] for name in names], CPU, dtype)
        return made[names]

    cache = kv_cache_of(config, kept=layers[0])
    sizes = dtype, CPU, max_tokens, MAX_ROWS, MAX_LEN
    kernels = PlainOps(multiply_in_blocks) if is_canonical else PlainOps()
    return FusedProgram(plan.ops, kernels, weight_of, cache, *sizes, group=group)


def logits_of_steps(
    config: ModelConfig, model: Any, size: int, steps: Sequence[Step], **options: Any
) -> torch.Tensor:
    """Return the logits of all rows of some steps, as rank 0 of ``size`` has them."""

    def work(group: DeviceGroup) -> torch.Tensor:
        program, found = rank_program(config, model, group, **options), []
        for step in steps:
            count = len(step.token_ids)
            program.run(step.padded(count, len(step.seq_lens)))
            for rows in torch.arange(count, dtype=torch.int32).split(MAX_ROWS):
                found.append(torch.full((len(rows), program.vocab_size), torch.nan))
                program.logits(rows, found[-1])
            assert not program.damaged[:count].any()
        return torch.cat(found)

    return in_ranks(size, work)[0]
