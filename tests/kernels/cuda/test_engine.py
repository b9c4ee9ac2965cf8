"""A whole engine by Triton's kernels: steps in flight, padded decode steps replayed, chunks, drafts
and samplers, against the same engine in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from fused_models import DEEPSEEK_V3, LLAMA, VOCAB, random_model
from hash_model import FunctionProposer
from queued_stream import QueuedStream

# Before anything is interpreted: kernels are decorated as their modules are imported.
import octavo.kernels.cuda.sampler
import octavo.kernels.cuda.triton_ops  # noqa: F401
from octavo.core.batch import Draft
from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.kernels.cuda.attention_plan import Gpu
from octavo.kernels.cuda.gemm_dispatch import GemmConditions
from octavo.models.config import ModelConfig
from octavo.models.kv_groups import group_layers
from octavo.runtime import cuda_components
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.cuda_backend import FusedBackend
from octavo.runtime.cuda_components import DeviceComponents, PlainComponents, TritonComponents
from octavo.runtime.kv_cache import copy_units
from octavo.runtime.rank import Rank
from octavo.runtime.streams import HostStream

CONFIGS = {
    "one table": replace(LLAMA, num_layers=1, layer_windows=(None,)),
    "latents and experts": replace(
        DEEPSEEK_V3,
        num_layers=1,
        layer_windows=(None,),
        experts=replace(DEEPSEEK_V3.experts, layers=(True,)),
    ),
    "a table for each window": replace(LLAMA, num_layers=2, layer_windows=(5, None)),
}
BLOCK_SIZE, NUM_BLOCKS = 4, 40
USUAL = {
    "max_tokens": 5,
    "temperature": 0.0,
    "ignore_eos": True,
    "speculative": {"enabled": False},
}
KINDS = [
    {"speculative": {"enabled": True}},
    {"temperature": 0.9, "top_k": 9},
    {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
]


class InterpretedKit(TritonComponents):
    """The kernels of a GPU, on tensors of the CPU."""

    compiles = False
    copy_units = staticmethod(copy_units)

    def create_stream(self) -> HostStream:
        return cuda_components.HostStream()

    def create_upload(self) -> None:
        return None


def kernels_on(device: str) -> TritonComponents:
    kit_type = InterpretedKit if device == "cpu" else TritonComponents
    return kit_type(torch.device(device), GemmConditions(Gpu(90, 8), torch.float32))


def answers(components: DeviceComponents, model_config: ModelConfig) -> dict[str, list[int]]:
    spec = RankSpec(Path(), components.device.type, block_size=BLOCK_SIZE)
    backend = FusedBackend(spec, random_model(model_config), model_config, components=components)
    rank = Rank(spec, model_config, backend)
    groups = group_layers(model_config.kv_layers)
    rank.start(RankLimits(NUM_BLOCKS, 3, 48, 8, groups))
    config = SchedulerConfig(
        max_num_batched_tokens=8, max_num_seqs=3, max_model_len=48, runs_ahead=True
    )
    drafts = FunctionProposer(lambda prompt, position: Draft.chain([position % VOCAB, 7]))
    cache = RadixPrefixCache(BLOCK_SIZE, groups.windows)
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, cache, groups.windows)
    engine = Engine(Scheduler(config, blocks, proposer=drafts), rank)
    requests = []
    for index, kind in enumerate(KINDS):
        params = SamplingParams(**(USUAL | kind))
        prompt = [(7 * index + 3 * i) % VOCAB for i in range(5 + 4 * index)]
        requests.append(Request(str(index), prompt, params, 0.0, seed=index))
        engine.add(requests[-1])
    while engine.step() is not None:
        pass
    assert not any(request.error for request in requests)
    return {request.request_id: request.output_token_ids for request in requests}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_answers_are_those_of_plain_torch(name, device, monkeypatch):
    made = []

    def queued() -> QueuedStream:
        made.append(QueuedStream())
        return made[-1]

    monkeypatch.setattr(cuda_components, "HostStream", queued)
    expected = answers(PlainComponents(torch.float32), CONFIGS[name])
    assert answers(kernels_on(device), CONFIGS[name]) == expected
    assert all(stream.num_replays > 2 for stream in made)
