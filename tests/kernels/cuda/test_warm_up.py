"""Nothing is compiled while a request waits: what traffic launches was launched by the warm-up.

Nothing of it is computed here. Launches are noted, with the keys by which Triton finds what it has
compiled.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from fused_models import DEEPSEEK_V3, GEMMA, LLAMA, VOCAB, random_model
from hash_model import FunctionProposer
from queued_stream import QueuedStream
from triton_tools import ARCHS, SHARED_LIMIT, launches

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
from octavo.core.token_mask import create_mask
from octavo.kernels.cuda import triton_products
from octavo.kernels.cuda.attention_plan import Gpu
from octavo.kernels.cuda.gemm_dispatch import GemmConditions
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import ModelConfig
from octavo.models.kv_groups import group_layers
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime import cuda_warmup
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.cuda_backend import FusedBackend
from octavo.runtime.cuda_components import TritonComponents
from octavo.runtime.cuda_graphs import StepGraphs
from octavo.runtime.rank import Rank

_LLAMA = replace(LLAMA, num_layers=1, layer_windows=(None,), intermediate_size=64)
_GEMMA = replace(
    GEMMA, num_layers=2, layer_windows=(9, None), intermediate_size=64, logit_softcap=5.0
)
_DEEPSEEK = replace(
    DEEPSEEK_V3,
    num_layers=1,
    layer_windows=(None,),
    experts=replace(DEEPSEEK_V3.experts, layers=(True,)),
)
MODELS = {
    "float": (_LLAMA, GGMLType.F32),
    "4 bits": (_LLAMA, GGMLType.Q4_0),
    "8 bits, with windows": (_GEMMA, GGMLType.Q8_0),
    "latents and experts": (_DEEPSEEK, GGMLType.F32),
}
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MAX_SEQS, MAX_TOKENS = 4, 400, 96, 20, 80
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 9},
    {"temperature": 0.8, "typical_p": 0.7, "logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 20},
    {"temperature": 0.0, "allowed_token_ids": [0, 4, 5]},
    {"temperature": 0.0, "logit_bias": {3: 1.0, 4: 2.0, 7: 1.0}, "logprobs": 0},
    {"temperature": 1.0, "allowed_token_ids": [0, 4], "top_p": 0.5, "logprobs": 1},
]


HOPPER = Gpu(90, 8)
# Registers that are put aside. Triton 3.6 needs 16 bytes at most, 3.9 needs 32 for gates and ups of
# 8 bits at 32 rows, on compute 9.0.
FEW_BYTES = 32
# Some of those that are launched.
KERNELS = {"_linear", "attend_rows", "attend_splits", "_pick_cut", "_change", "_logprobs_of_row"}


class NotedComponents(TritonComponents):
    """The kernels of a GPU, to be launched on tensors of the CPU."""

    def create_stream(self) -> QueuedStream:
        return QueuedStream()

    def create_upload(self) -> None:
        return None


def started(config: ModelConfig, type: GGMLType, gpu: Gpu = HOPPER, dtype: str = "float32") -> Rank:
    components = NotedComponents(torch.device("cpu"), GemmConditions(gpu, getattr(torch, dtype)))
    spec = RankSpec(Path(), dtype=dtype, block_size=BLOCK_SIZE)
    rank = Rank(
        spec, config, FusedBackend(spec, random_model(config, type), config, components=components)
    )
    groups = group_layers(config.kv_layers)
    rank.start(RankLimits(NUM_BLOCKS, MAX_SEQS, MAX_LEN, MAX_TOKENS, groups))
    rank.forward._sampled.logprobs.fill_(1)  # log-probabilities, as nobody computes any
    return rank


def serve(rank: Rank, seed: int) -> None:
    """Requests of all kinds, of which some come while others are answered, and some have drafts."""
    rng = random.Random(seed)
    groups = group_layers(rank.model_config.kv_layers)
    config = SchedulerConfig(MAX_TOKENS, MAX_SEQS, MAX_LEN, runs_ahead=True)
    blocks = BlockManager(
        NUM_BLOCKS, BLOCK_SIZE, RadixPrefixCache(BLOCK_SIZE, groups.windows), groups.windows
    )

    def propose(prompt, position) -> Draft | None:
        return Draft.chain([7] * rng.randint(1, 9)) if rng.random() < 0.2 else None

    scheduler = Scheduler(config, blocks, proposer=FunctionProposer(propose))
    engine = Engine(scheduler, rank)
    requests = [request_of(index, rng) for index in range(30)]
    for request in requests:
        engine.add(request)
        for _ in range(rng.randint(0, 2)):
            engine.step()
    while engine.step() is not None:
        pass
    assert not any(request.error for request in requests)


def request_of(index: int, rng: random.Random) -> Request:
    asked = {"max_tokens": rng.randint(3, 12), "ignore_eos": True, **KINDS[index % len(KINDS)]}
    params = SamplingParams(**asked)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 7, 16, 40, 70]))]
    mask = create_mask(params, VOCAB, stop_token_ids=(1,))
    return Request(str(index), prompt, params, 0.0, seed=index, mask=mask)


def keys_of(function) -> set[str]:
    return {launch.key for launch in launches(function)}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_compiled_while_requests_wait(name):
    made = []
    warm = keys_of(lambda: made.append(started(*MODELS[name])))
    for seed in range(3):
        asked = keys_of(lambda seed=seed: serve(made[0], seed))
        assert {key.partition(" ")[0] for key in asked} >= KERNELS
        assert sorted(asked - warm) == []


def test_without_it_much_is_compiled(monkeypatch):
    """So that these keys say something."""
    monkeypatch.setattr(cuda_warmup, "warm_up_shapes", lambda *_: ())
    monkeypatch.setattr(StepGraphs, "capture", lambda self: None)
    made = []
    # Copies of blocks, over the cache of the trial and that of the engine.
    assert len(keys_of(lambda: made.append(started(*MODELS["4 bits"])))) <= 2
    assert len(keys_of(lambda: serve(made[0], 0))) > 25


# Of a usual shape, but for its depth and its vocabulary.
USUAL = {
    "num_layers": 1,
    "layer_windows": (None,),
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 128,
    "rope": RopeConfig(1000.0, 128),
    "vocab_size": 4096,
}


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("type", [GGMLType.F32, GGMLType.Q4_0, GGMLType.Q8_0], ids=str)
def test_all_that_is_launched_fits(type, arch, monkeypatch):
    monkeypatch.setattr(triton_products, "_gemm", lambda *_: None)  # of bfloat16, to float32
    config, gpu = replace(LLAMA, **USUAL), Gpu(arch, 132)
    seen = {each.key: each for each in launches(lambda: started(config, type, gpu, "bfloat16"))}
    for launch in seen.values():
        made = launch.compiled(arch)
        assert made.spills <= FEW_BYTES, launch.key
        assert made.shared <= SHARED_LIMIT[arch], launch.key
    assert len(seen) > 25
