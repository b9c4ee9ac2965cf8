"""Units copied in one launch, against indexing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from octavo.kernels.cuda.kv_copy import copy_units, launch_copies
from octavo.kernels.kv_stores import CODECS
from octavo.runtime.kv_cache import KVCache


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
    pairs = torch.tensor([[1, 5], [3, -1], [6, 2]], dtype=torch.int32, device=device)
    launch_copies([memory], pairs)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_a_cache_copies_and_moves_as_it_does_without_kernels(device, kv):
    """Of codes and scales alike, one after the other: what a move frees, the next one takes."""

    def filled(**how):
        cache = KVCache(2, 5, 4, 3, 64, CODECS[kv], torch.device(device), **how)
        generator = torch.Generator().manual_seed(0)
        for part in parts(cache):
            part.copy_(torch.randint(0, 200, part.shape, generator=generator))
        return cache

    def parts(cache):
        return [part for i in range(2) for store in cache.layer(i) for part in store.parts]

    one, other = filled(), filled(copy_units=copy_units)
    for cache in (one, other):
        cache.copy_blocks([(0, 2), (2, 3)])
        cache.move([4, 1, 2], [3, 5, 6, 9], 2)
        cache.move([4, 1, 2], [], 2)
    for part, expected in zip(parts(other), parts(one), strict=True):
        assert torch.equal(part, expected)
