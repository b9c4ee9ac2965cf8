"""Latent attention in an engine: answers do not depend on how a request was run, to the last bit,
whatever computes it, and a pool of latents holds what it should."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from faults import FaultyScheduler, every
from paging_variants import make_requests
from safetensors.torch import save_file

from octavo.kernels.cpu import library
from octavo.layers.module import named_parameters
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config_hf import config_from_hf
from octavo.models.footprint import matrices, weight_types
from octavo.models.registry import model_class
from octavo.runtime.capacity import RankSpec
from octavo.runtime.rank import Rank
from octavo.system import machine

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 256,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
}
KERNELS = ["reference", "native", "fused"]
VARIANTS = {
    "other blocks": {"block_size": 32, "num_blocks": 32},
    "budget 7": {"max_num_batched_tokens": 7},
    "no prefix cache": {"prefix_caching": False},
    "few blocks": {"num_blocks": 8},
}


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request):
    if request.param == "native" and not library.runnable():
        pytest.skip("no native library was built")
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A DeepSeek of two layers with random weights, the second with experts."""
    folder = tmp_path_factory.mktemp("deepseek")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = config_from_hf(CONFIG)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in named_parameters(model_class(config.architecture)(config)):
        is_matrix = len(parameter.shape) == 2
        values = torch.randn(parameter.shape, generator=generator)
        tensors[name] = values * (0.3 if is_matrix else 0.1) + (0.0 if is_matrix else 1.0)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def latent_bench(load_bench, folder):
    return load_bench(folder)


def requests_of(bench):
    return make_requests(bench.config.vocab_size, count=6, most=60, longest_answer=14)


@pytest.fixture(scope="module")
def alone(latent_bench, run_all, kernels):
    """The answers when every request runs by itself, with nothing cached."""
    engine = latent_bench.engine(prefix_caching=False, kernels=kernels)
    return run_all(engine, requests_of(latent_bench), together=False)[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same_to_the_last_bit(latent_bench, run_all, alone, kernels, name):
    engine = latent_bench.engine(kernels=kernels, **VARIANTS[name])
    assert run_all(engine, requests_of(latent_bench))[0] == alone


def test_preemption_every_third_step_changes_nothing(latent_bench, run_all, alone, kernels):
    engine = latent_bench.engine(kernels=kernels)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    assert run_all(engine, requests_of(latent_bench))[0] == alone
    assert engine.scheduler.num_preemptions > 2


def test_a_warm_cache_changes_nothing(latent_bench, run_all, alone, kernels):
    engine = latent_bench.engine(kernels=kernels)
    run_all(engine, requests_of(latent_bench))
    assert run_all(engine, requests_of(latent_bench))[0] == alone
    assert engine.scheduler.prefix_tokens_hit > 0


def test_a_pool_has_one_row_for_each_token(latent_bench, kernels):
    engine = latent_bench.engine(kernels=kernels, kv_cache_dtype="f32")
    latent = latent_bench.config.latent
    row = 4 * (latent.kv_rank + latent.rope_dim)
    assert engine.executor.probe().kv_bytes_per_token == row * latent_bench.config.num_layers


@pytest.mark.skipif(not library.runnable(), reason="not built")
def test_a_pool_leaves_room_for_the_weights_of_latents(folder, monkeypatch):
    """These are made with the pool, of weights that were packed before."""
    rank = Rank.load(RankSpec(folder, kernels="native", threads=1))
    line, experts = (each.num_bytes for each in rank.backend.planned_memory())
    heads, nope, rank_dim = 3, 12, 24
    numbers = heads * (nope * 32 + rank_dim * 16)  # to whole vectors of outputs
    assert line == 2 * 4 * numbers  # of two layers
    free = machine.Memory(total=1 << 30, available=line + experts + 2000, limit=None)
    monkeypatch.setattr(machine, "memory", lambda: free)
    assert rank.capacity.kv_memory_bytes == 1000


@pytest.mark.skipif(not library.runnable(), reason="not built")
def test_a_step_reads_what_the_footprint_says(folder, latent_bench):
    probe = latent_bench.engine(kernels="native").executor.probe()
    checkpoint = open_checkpoint(folder)
    planned = matrices(latent_bench.config, weight_types(checkpoint, latent_bench.config))
    assert Counter(probe.matrices()) == Counter(planned)
