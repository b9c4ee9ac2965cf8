"""Probes of a device by PyTorch."""

from __future__ import annotations

import pytest
import torch

from octavo.bench.gpu.random_model import SHAPES, write_random_model
from octavo.cost.loaded_model import computed_in
from octavo.kernels.cuda import gemm_dispatch
from octavo.kernels.cuda.attention_plan import Gpu
from octavo.kernels.cuda.weights import W8Weight
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.rank import Rank
from octavo.runtime.torch_probe import arithmetic_of, products, reads

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
def test_products_count_their_operations(device, dtype):
    try:
        run = products(torch.device(device), dtype)
    except (RuntimeError, NotImplementedError) as refused:
        assert dtype == torch.float8_e4m3fn, refused
        pytest.skip(f"no products of FP8 here: {refused}")
    assert run(2) == 2 * run(1) > 0


@pytest.mark.parametrize("device", DEVICES)
def test_reads_count_their_bytes(device):
    run = reads(torch.device(device))
    assert run() >= 256 << 20


def test_a_fused_model_tells_of_its_packed_weights(tmp_path):
    """Their bytes as they lie on the device; the embedding counts as the head that it is."""
    shape = SHAPES["tiny"]
    write_random_model(tmp_path / "model", shape, "w4")
    rank = Rank.load(RankSpec(tmp_path / "model", kernels="fused", max_model_len=64))
    rank.start(RankLimits(4, 2, 64, 32))
    probe = rank.probe()
    heads = [matrix for matrix in probe.matrices() if matrix.is_head]
    layers = [matrix for matrix in probe.matrices() if not matrix.is_head]
    assert [head.num_params for head in heads] == [shape.vocab_size * shape.hidden_size]
    assert sum(matrix.num_params for matrix in layers) == shape.layer_params
    assert len(layers) == 4 * shape.num_hidden_layers  # those of one input are one
    assert sum(8 * m.num_bytes for m in layers) == pytest.approx(
        4.125 * shape.layer_params, rel=0.02
    )
    assert {matrix.arithmetic for matrix in probe.matrices()} == {"torch float32"}
    assert probe.products("torch float32")(1) > 0


def test_weights_of_8_bits_are_multiplied_in_8_bits_where_gpus_can():
    codes = torch.empty(256, 256, dtype=torch.float8_e4m3fn, device="meta")
    weight = W8Weight(codes, torch.empty(1, 256, device="meta"), None, None, True)
    found = [
        gemm_dispatch.multiplied_as(weight, gemm_dispatch.GemmConditions(Gpu(arch, 100)))
        for arch in (80, 90)
    ]
    assert found == [torch.bfloat16, torch.float8_e4m3fn]
    assert computed_in(arithmetic_of(found[1])) == "fp8"
