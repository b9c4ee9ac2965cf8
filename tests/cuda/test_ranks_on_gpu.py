"""Ranks on GPUs: NCCL in graphs on one, and engines on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo import LLM, SamplingParams
from octavo.bench.gpu.random_model import SHAPES, write_random_model
from octavo.kernels.cuda.device_group import NcclGroup
from octavo.runtime.streams import CudaStream

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
PROMPTS = [[3 + i, 17, 40 + 2 * i, 5, 99, 7][: 3 + i % 4] * (1 + 3 * i) for i in range(9)]


def test_a_group_of_one_in_a_graph(tmp_path):
    """Ten thousand replays, each of which sums, gathers and shares."""
    device = torch.device("cuda:0")
    group = NcclGroup(dist.FileStore(str(tmp_path / "meeting"), 1), 0, 1, device)
    stream = CudaStream(device)
    x, gathered = torch.ones(64, 256, device=device), torch.zeros(1, 64, 256, device=device)
    token_ids = torch.arange(64, dtype=torch.int32, device=device)

    def work() -> None:
        x.add_(1)
        group.sum(x)
        group.gather_everywhere(x, gathered)
        group.gather(x, gathered)
        group.share(token_ids)

    stream.catch_up()
    stream.launch(work)
    graph = stream.capture(work)
    for _ in range(10_000):
        stream.launch(graph.replay)
    stream.mark().wait()
    group.check()
    assert (gathered == 10_002).all()
    assert token_ids.tolist() == list(range(64))


def answers(model: Path, **settings: Any) -> list[tuple[list[int], float]]:
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "num_blocks": 96}
    with LLM(str(model), device="cuda", kernels="fused", **sizes, **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs]


@on_two
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_canonical_sums_of_two_gpus_are_those_of_one(tmp_path, is_eager):
    write_random_model(tmp_path / "model", SHAPES["tiny"], "bf16")
    settings = {"batch_invariant": True, "enforce_eager": is_eager}
    alone = answers(tmp_path / "model", **settings)
    assert answers(tmp_path / "model", tensor_parallel_size=2, **settings) == alone


@on_two
def test_two_gpus_say_nearly_what_one_says(tiny_model):
    """In float32, where rounding does not decide."""
    alone = answers(tiny_model, dtype="float32")
    together = answers(tiny_model, dtype="float32", tensor_parallel_size=2)
    for (tokens, logprob), (others, other) in zip(together, alone, strict=True):
        assert tokens == others
        assert logprob == pytest.approx(other, abs=1e-2)
