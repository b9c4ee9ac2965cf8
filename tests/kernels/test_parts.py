"""Parts of a tensor-parallel group: all ranks together have everything, and nothing twice."""

from __future__ import annotations

import pytest

from octavo.kernels.cpu.layout import TILE
from octavo.kernels.division import head_slices
from octavo.kernels.parts import WHOLE, Part

SIZES = (1, 2, 3, 4, 5, 8)


def parts(size):
    return [Part(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [128, 130, 576, 4864, 49152, 151_936])
def test_rows_are_cut_at_tiles_and_evenly(size, num_rows):
    ranges = [part.of_rows(num_rows) for part in parts(size)]
    assert [row for each in ranges for row in each] == list(range(num_rows))
    assert all(each.start % TILE == 0 for each in ranges)
    lengths = [len(each) for each in ranges]
    assert max(lengths) - min(lengths) < 2 * TILE


def test_nine_heads_are_four_and_five():
    assert [len(part.of_heads(9)) for part in parts(2)] == [4, 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "num_heads, num_kv_heads", [(9, 3), (14, 2), (32, 8), (8, 1), (9, 9), (25, 5), (64, 8)]
)
def test_every_query_head_has_its_kv_head(size, num_heads, num_kv_heads):
    group = num_heads // num_kv_heads
    seen = []
    for part in parts(size):
        heads, kv_heads = part.of_heads(num_heads), part.of_kv_heads(num_heads, num_kv_heads)
        slices = list(head_slices(heads, group))
        seen += heads
        read = []
        for each in slices:
            assert each.num_heads % each.num_kv_heads == 0
            per_kv_head = each.num_heads // each.num_kv_heads
            for head in range(each.first_head, each.first_head + each.num_heads):
                kv_head = each.first_kv_head + (head - each.first_head) // per_kv_head
                assert kv_head == head // group
                assert kv_head in kv_heads
            read += range(each.first_kv_head, each.first_kv_head + each.num_kv_heads)
        # A KV head is written by one slice of a rank alone.
        assert read == list(kv_heads)
        assert sum(each.num_heads for each in slices) == len(heads)
    assert seen == list(range(num_heads))


def test_one_rank_has_one_slice():
    assert len(list(head_slices(WHOLE.of_heads(32), 4))) == 1
