"""A whole engine by Triton's kernels: steps in flight, padded decode steps replayed, chunks, drafts
and samplers, against the same engine in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fused_models import LLAMA, VOCAB, random_model
from queued_stream import QueuedStream

from octavo.core.batch import Draft
from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.executor.hashing import GuessingProposer
from octavo.executor.local import LocalExecutor
from octavo.kernels.cuda.attention_plan import AttentionLimits, Gpu
from octavo.kernels.cuda.sampler import TritonSampler
from octavo.kernels.cuda.triton_ops import create_triton_ops
from octavo.runtime import cuda_backend
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.cuda_backend import FusedBackend
from octavo.runtime.cuda_forward import num_logits_rows
from octavo.runtime.rank import Rank

CONFIG = replace(LLAMA, num_layers=1, layer_windows=(None,))
LIMITS = RankLimits(num_blocks=12, max_num_seqs=3, max_model_len=48, max_num_batched_tokens=8)
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


class TritonBackend(FusedBackend):
    """By the kernels of a GPU, whatever the device is."""

    def _create_ops(self, kv_cache, limits, device):
        return create_triton_ops(
            self._plan.phases,
            self._weights,
            kv_cache,
            self._dtype,
            device,
            limits.max_num_batched_tokens,
            num_logits_rows(limits),
            AttentionLimits(limits.max_num_seqs, 4, limits.max_model_len),
            Gpu(90, 8),
        )

    def _create_sampler(self, limits, device):
        return TritonSampler(num_logits_rows(limits), VOCAB, device)


def answers(backend_type, device: str) -> dict[str, list[int]]:
    backend = backend_type(RankSpec(Path(), device), random_model(CONFIG), CONFIG)
    rank = Rank(RankSpec(Path(), device), CONFIG, backend)
    rank.start(LIMITS)
    config = SchedulerConfig(
        max_num_batched_tokens=8, max_num_seqs=3, max_model_len=48, runs_ahead=True
    )
    drafts = GuessingProposer(lambda prompt, position: Draft.chain([position % VOCAB, 7]))
    blocks = BlockManager(LIMITS.num_blocks, 16, RadixPrefixCache(16))
    engine = Engine(Scheduler(config, blocks, proposer=drafts), LocalExecutor(rank))
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


def test_the_answers_are_those_of_plain_torch(device, monkeypatch):
    made = []

    def queued() -> QueuedStream:
        made.append(QueuedStream())
        return made[-1]

    monkeypatch.setattr(cuda_backend, "HostStream", queued)
    expected = answers(FusedBackend, "cpu")
    assert answers(TritonBackend, device) == expected
    assert all(stream.num_replays > 2 for stream in made)
