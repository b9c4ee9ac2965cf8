"""Each write to the KV cache and each attention of an engine on a GPU, against the same in plain
PyTorch: where an answer of ``test_on_gpu.py`` is wrong, this says which launch made it so."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo import LLM, SamplingParams
from octavo.kernels.cuda.ops import Attend, AttentionLayer, StepTensors
from octavo.kernels.cuda.plain_ops import PlainOps
from octavo.kernels.cuda.triton_ops import TritonOps
from octavo.kernels.kv_stores import KVStore

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[3 + i, 17, 40 + 2 * i, 5, 99, 7][: 3 + i % 4] * (1 + 3 * i) for i in range(9)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@dataclass
class ComparedOps:
    """Ops of a GPU, each followed by the same in plain PyTorch on copies of what it reads."""

    write: Any
    plan: Any
    differences: list[str] = field(default_factory=list)
    num_attended: int = 0
    queries: Tensor | None = None  # of the last write, not rotated

    def write_kv(
        self, ops: TritonOps, qkv: Tensor, step: StepTensors, layer: AttentionLayer, q_out: Tensor
    ) -> None:
        expected = replace(layer, k_cache=copy_of(layer.k_cache), v_cache=copy_of(layer.v_cache))
        self.queries = torch.empty_like(q_out)
        plain_ops().write_kv(qkv, step, expected, self.queries)
        self.write(ops, qkv, step, layer, q_out)
        for name in ("k_cache", "v_cache"):
            for part, wanted in zip(
                getattr(layer, name).parts, getattr(expected, name).parts, strict=True
            ):
                if not torch.equal(part, wanted):
                    at = (part != wanted).nonzero()
                    self.differences.append(
                        f"{name} of {len(qkv)} tokens: {len(at)} of {part.numel()} in {part.dtype} "
                        f"differ, first at {at[0].tolist()}"
                    )

    def plan_attention(self, ops: TritonOps, step: StepTensors) -> Attend:
        attend, plain = self.plan(ops, step), plain_ops().plan_attention(step)

        def both(q: Tensor, layer: AttentionLayer, out: Tensor) -> None:
            expected = torch.zeros_like(out)
            assert self.queries is not None
            plain(self.queries, layer, expected)
            attend(q, layer, out)
            tables = step.tables[layer.group]
            count = int(tables.query_start[-1])
            apart = (out[:count] - expected[:count]).abs().amax((1, 2))
            self.num_attended += 1
            if not apart.max() < 1e-3:
                rows = (~(apart < 1e-3)).nonzero()[:, 0].tolist()
                self.differences.append(
                    f"attention of rows {rows} of {count}, lengths {tables.seq_lens.tolist()}, "
                    f"starts {tables.query_start.tolist()}, by up to {apart.max():.3g}"
                )

        return both


def plain_ops() -> PlainOps:
    return PlainOps.__new__(PlainOps)  # these ops need no products


def copy_of(store: KVStore) -> KVStore:
    return KVStore(store.codec, [part.clone() for part in store.parts])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_writes_and_attention_are_those_of_plain_torch(tiny_model, monkeypatch, kv_cache_dtype):
    llm = LLM(
        str(tiny_model),
        device="cuda",
        kernels="fused",
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_blocks=96,
        enforce_eager=True,
        async_scheduling=False,
    )
    compared = ComparedOps(TritonOps.write_kv, TritonOps.plan_attention)
    monkeypatch.setattr(TritonOps, "write_kv", lambda *args: compared.write_kv(*args))
    monkeypatch.setattr(TritonOps, "plan_attention", lambda *args: compared.plan_attention(*args))
    llm.generate(PROMPTS, PARAMS)
    llm.close()
    assert compared.num_attended > 10
    assert compared.differences == []
