"""Blocks copied in one launch, against indexing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from octavo.kernels.cuda.kv_copy import copy_blocks


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (3, 7, 16, 2, 80)),  # more than one program takes
        (torch.bfloat16, (2, 7, 4, 3, 64)),
        (torch.uint8, (2, 7, 1, 1, 4)),
    ],
)
def test_copies_are_those_of_all_layers(device, dtype, shape):
    memory = torch.randint(0, 200, shape).to(dtype).to(device)
    expected = memory.clone()
    expected[:, [5, 2]] = memory[:, [1, 6]]
    sources, targets = torch.tensor([[1, 3, 6], [5, -1, 2]], device=device)
    copy_blocks(memory, sources, targets)
    assert torch.equal(memory, expected)
