"""Probes of a device by PyTorch."""

from __future__ import annotations

import pytest
import torch

from octavo.runtime.torch_probe import products, reads

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
