from __future__ import annotations

import resource

import pytest
import torch

from octavo.kernels.kv_stores import CODECS
from octavo.runtime.kv_cache import KVCache


def make_cache(num_blocks: int = 4, dtype: str = "float32", num_host_blocks: int = 0) -> KVCache:
    codecs, device = CODECS[dtype], torch.device("cpu")
    return KVCache(2, num_blocks, 3, 1, 8, codecs, device, num_host_blocks=num_host_blocks)


def test_layers_are_views_of_one_pool():
    cache = make_cache()
    (keys,), (values,) = (store.parts for store in cache.layer(1))
    assert keys.shape == values.shape == (4, 3, 1, 8)
    keys[2] = 1.0
    assert cache.layer(1)[0].parts[0][2].sum() == 24 and cache.layer(0)[0].parts[0].sum() == 0
    assert cache.num_bytes == 2 * 2 * 4 * 3 * 8 * 4


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_copies_are_done_in_order(dtype):
    """Of codes, scales and minima alike."""
    cache = make_cache(dtype=dtype)
    tensors = [part for layer in range(2) for store in cache.layer(layer) for part in store.parts]
    assert len(tensors) == 4 * {"float32": 1, "int8": 2, "int4": 3}[dtype]
    for tensor in tensors:
        tensor[0] = 5.0
        tensor[1] = 6.0
    cache.copy_blocks([(0, 2), (2, 3), (1, 0)])
    for tensor in tensors:
        assert [tensor[block].unique().tolist() for block in range(4)] == [[6], [6], [5], [5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_blocks_go_to_the_shelf_and_come_back_bit_for_bit(dtype):
    cache = make_cache(dtype=dtype, num_host_blocks=2)
    parts = [part for layer in range(2) for store in cache.layer(layer) for part in store.parts]
    for part in parts:
        part.copy_(torch.randint(0, 100, part.shape))
    before = [part.clone() for part in parts]
    assert cache.host_blocks.shape == (2, cache.num_bytes // 4)
    # Out of the pool, written over, and back to other places; among copies within the pool.
    cache.copy_blocks([(1, 4), (2, 5), (0, 1), (4, 2), (5, 3)])
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part, old[[0, 0, 1, 2]])
    kept = cache.host_blocks.copy()
    cache.host_blocks[:] = 0
    cache.copy_blocks([(2, 4), (3, 5)])
    assert (cache.host_blocks == kept).all() and kept.any()


def test_a_pool_costs_memory_only_where_it_is_used():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = KVCache(1, 2**16, 16, 4, 64, CODECS["float32"], torch.device("cpu"))  # 2 GiB
    assert cache.num_bytes == 2**31
    cache.layer(0)[0].parts[0][5] = 1.0
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 100 * 1024  # kilobytes


def test_half_precision_pools():
    assert make_cache(dtype="bfloat16").layer(0)[0].parts[0].dtype is torch.bfloat16
