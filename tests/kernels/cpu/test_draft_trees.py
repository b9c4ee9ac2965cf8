"""Drafts that are trees in native attention: each row is, to the bit, what it would be if its path
were all there is."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_attention import (
    FORMATS,
    Cache,
    Layer,
    Sequence,
    Step,
    attend,
    attend_all,
    make_sequence,
)

from octavo.base.errors import EngineError
from octavo.kernels.cpu import abi

SMALL = Layer(heads=3, kv_heads=1, dim=16, rotary=16)
FORKED = [-1, -1, 0, 0, 1, 4, 2, 6, 6]


def random_tree(rng: random.Random, count: int) -> list[int]:
    """Parents of drafted tokens: bushy, deep, or anything between."""
    reach = rng.choice([1, 2, 4, count])
    return [rng.randint(max(-1, index - reach), index - 1) for index in range(count)]


def path_of(tree: list[int], index: int) -> list[int]:
    """The drafted tokens down to one, itself the last."""
    path: list[int] = []
    while index >= 0:
        path.insert(0, index)
        index = tree[index]
    return path


def take(sequence: Sequence, num_known: int, path: list[int]) -> Sequence:
    """The known tokens of a sequence in the order of slots, and some of its drafted ones."""
    slots = [*range(num_known), *(num_known + index for index in path)]
    return Sequence(sequence.q[slots], sequence.k[slots], sequence.v[slots], sequence.blocks)


def rows_of(tree: list[int], known: int, first_row: int) -> list[int]:
    """``oct_sequences.parents`` of a sequence whose rows are some known ones and then a tree."""
    drafted = first_row + known
    return [-1] * known + [drafted + parent for parent in tree]


def expected(native, layer: Layer, sequence: Sequence, num_known: int, tree: list[int], new: int):
    """Outputs of the last known tokens, and of every path's last token: one prompt for each."""
    paths = [take(sequence, num_known, path_of(tree, index)) for index in range(len(tree))]
    known = attend_all(native, layer, take(sequence, num_known, []))[num_known - new :]
    if not tree:
        return known
    cache = Cache(native, layer, paths)
    outs = attend(cache, [(i, 0, len(path)) for i, path in enumerate(paths)])
    return np.concatenate([known, *(out[-1:] for out in outs)])


def check_tree(native, layer: Layer, num_known: int, tree: list[int], seed=0, new=1, pools=(None,)):
    sequence = make_sequence(layer, num_known + len(tree), seed)
    cache = Cache(native, layer, [sequence], seed=seed)
    if num_known > new:
        attend(cache, [(0, 0, num_known - new)])
    chunk = (0, num_known - new, new + len(tree))
    wanted = expected(native, layer, sequence, num_known, tree, new)
    for pool in pools:
        (out,) = attend(cache, [chunk], pool, rows_of(tree, new, 0))
        assert np.array_equal(out, wanted)
    return cache


# ---- Bit by bit


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("num_known", [1, 15, 16, 17, 62, 64, 255, 256, 259])
def test_a_row_sees_its_path_alone(native, kv, num_known):
    """Around the borders of chunks, tiles and splits."""
    check_tree(native, replace(SMALL, kv=kv), num_known, FORKED)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("dim", [16, 48, 80, 128, 256])
def test_head_sizes(native, kv, dim):
    check_tree(native, Layer(kv=kv, dim=dim, rotary=dim, heads=4, kv_heads=2), 27, FORKED)


VARIANTS = {
    "window 1": Layer(window=1),
    "window 2": Layer(window=2),
    "window 5": Layer(window=5),
    "window 17": Layer(window=17),
    "window 64, softcap, sinks": Layer(window=64, softcap=8.0, sinks=True),
    "norms, partial interleaved rope": Layer(rotary=10, interleaved=True, qk_norm=True),
    "no rope": Layer(rotary=0),
    "blocks of 16": Layer(block_size=16),
    "blocks of 64": Layer(block_size=64),
    "many heads": Layer(heads=14, kv_heads=1),
    "padded heads": Layer(dim=40, kv="int4", qk_norm=True),
}


@pytest.mark.parametrize("kv", ["f32", "bf16", "int4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(native, kv, name):
    for num_known in (5, 60, 77):
        check_tree(native, replace(VARIANTS[name], kv=kv), num_known, FORKED)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([*FORMATS]),
    st.integers(1, 280),
    st.integers(1, 40),
    st.sampled_from([0, 0, 1, 3, 16, 40, 100, 257]),
    st.integers(1, 20),
)
def test_random_trees(native, rng, kv, num_known, count, window, new):
    layer = replace(SMALL, kv=kv, window=window, block_size=rng.choice([16, 32, 48]))
    check_tree(
        native, layer, num_known, random_tree(rng, count), rng.randrange(99), min(new, num_known)
    )


def test_a_tree_as_long_as_a_split(native, make_pool):
    """Its paths end in several splits, and each may be an item of its own."""
    rng = random.Random(1)
    tree = [rng.randint(max(-1, i - 2), i - 1) for i in range(420)]
    assert len(path_of(tree, 419)) > 256
    pools = make_pool(1), make_pool(3)
    check_tree(native, replace(SMALL, kv="bf16", heads=1), 230, tree, pools=pools)


@pytest.mark.thinned_on_scalar(2)
@pytest.mark.parametrize("kv", FORMATS)
def test_company(native, make_pool, kv):
    """Trees beside a chain, prompts and single tokens: nobody notices."""
    layer = replace(SMALL, kv=kv, window=290)
    rng = random.Random(4)
    trees = [random_tree(rng, 12), random_tree(rng, 30), list(range(-1, 5)), [], []]
    known, new = [100, 250, 64, 300, 40], [1, 2, 1, 1, 40]
    sequences = [
        make_sequence(layer, count + len(tree), i)
        for i, (tree, count) in enumerate(zip(trees, known, strict=True))
    ]
    cache = Cache(native, layer, sequences)
    before = [count - last for count, last in zip(known, new, strict=True)]
    attend(cache, [(i, 0, count) for i, count in enumerate(before) if count])
    chunks, parents = [], []
    for i, tree in enumerate(trees):
        chunks.append((i, before[i], new[i] + len(tree)))
        is_chain = i == 2
        parents += [-1] * (1 + len(tree)) if is_chain else rows_of(tree, new[i], len(parents))
    by_one, by_three = (attend(cache, chunks, make_pool(n), parents) for n in (1, 3))
    for i, (out, again) in enumerate(zip(by_one, by_three, strict=True)):
        wanted = expected(native, layer, sequences[i], known[i], trees[i], new[i])
        assert np.array_equal(out, wanted) and np.array_equal(again, wanted), i


@pytest.mark.parametrize("kv", FORMATS)
def test_a_tree_that_is_a_chain_is_one(native, kv):
    layer = replace(SMALL, kv=kv)
    sequence = make_sequence(layer, 80, 3)
    outs = []
    for parents in (None, [-1] * 20, rows_of([*range(-1, 18)], 1, 0)):
        cache = Cache(native, layer, [sequence])
        attend(cache, [(0, 0, 60)])
        outs.append(attend(cache, [(0, 60, 20)], parents=parents)[0])
        outs.append(np.stack(cache.read(0, 80)))
    assert np.array_equal(outs[0], outs[2]) and np.array_equal(outs[0], outs[4])
    assert np.array_equal(outs[1], outs[3]) and np.array_equal(outs[1], outs[5])


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("where", ["k", "v"])
def test_damage_stays_with_those_who_follow(native, kv, where):
    layer = replace(SMALL, kv=kv)
    num_known, tree = 30, FORKED
    sequence = make_sequence(layer, num_known + len(tree), 1)
    clean = expected(native, layer, sequence, num_known, tree, 1)
    getattr(sequence, where)[num_known + 2, 0, 3] = np.nan
    cache = Cache(native, layer, [sequence])
    attend(cache, [(0, 0, num_known - 1)])
    (out,) = attend(cache, [(0, num_known - 1, 1 + len(tree))], parents=rows_of(tree, 1, 0))
    for index in range(-1, len(tree)):
        if 2 in path_of(tree, index):
            assert not np.isfinite(out[1 + index]).any()
        else:
            assert np.array_equal(out[1 + index], clean[1 + index])


# ---- Moves


def memory_of(cache: Cache) -> abi.KvMemory:
    layer = cache.layer
    chunk = cache.native.lib.oct_kv_chunk_bytes(FORMATS[layer.kv], layer.dim)
    return abi.KvMemory(
        kv_format=FORMATS[layer.kv],
        num_kv_heads=layer.kv_heads,
        head_dim=layer.dim,
        num_layers=1,
        num_blocks=cache.num_blocks,
        block_size=layer.block_size,
        layer_bytes=layer.kv_heads * (layer.block_size // 16) * chunk,
        block_bytes=cache.block_bytes,
        kv=cache.memory.ctypes.data,
    )


def move(cache: Cache, sources: list[int], target: int, memory=None, blocks=None) -> None:
    blocks = cache.sequences[0].blocks if blocks is None else np.array(blocks, np.int32)
    slots = np.array(sources, np.int32)
    code = cache.native.lib.oct_kv_move(
        memory or memory_of(cache),
        blocks.ctypes.data,
        len(blocks),
        slots.ctypes.data,
        len(slots),
        target,
    )
    cache.native.check(code)


@pytest.mark.thinned_on_scalar(3)
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("dim", [16, 48, 256])
def test_what_was_right_is_as_if_it_had_been_written_there(native, kv, dim):
    """To the byte, and the next tokens are those of the path."""
    layer = Layer(kv=kv, dim=dim, rotary=dim, heads=4, kv_heads=2, block_size=16)
    rng = random.Random(dim)
    for num_known in (1, 13, 16, 30):
        tree = random_tree(rng, 16)
        path = max((path_of(tree, index) for index in range(len(tree))), key=len)
        cache = check_tree(native, layer, num_known, tree)
        (sequence,) = cache.sequences
        length = num_known + len(path)
        move(cache, [num_known + index for index in path], num_known)

        plain = take(sequence, num_known, path)
        follower = make_sequence(layer, 1, 7)
        for name in "qkv":
            both = [getattr(plain, name), getattr(follower, name)]
            setattr(plain, name, np.concatenate(both))
        wanted = Cache(native, layer, [plain])
        attend(wanted, [(0, 0, length)])
        for moved, written in zip(cache.read(0, length), wanted.read(0, length), strict=True):
            assert moved.tobytes() == written.tobytes()
        (last,) = attend(wanted, [(0, length, 1)])
        blocks = sequence.blocks
        cache.sequences[0] = replace(plain, blocks=blocks)
        (out,) = attend(cache, [(0, length, 1)])
        assert np.array_equal(out, last)


@pytest.mark.parametrize("kv", FORMATS)
def test_a_move_touches_no_other_slot(native, kv):
    layer = Layer(kv=kv, block_size=16)
    cache = Cache(native, layer, [make_sequence(layer, 60, 5)])
    attend(cache, [(0, 0, 60)])
    before = cache.read(0, 60)
    move(cache, [20, 22, 23, 37, 59], 20)
    order = [*range(20), 20, 22, 23, 37, 59, *range(25, 60)]
    for old, new in zip(before, cache.read(0, 60), strict=True):
        assert np.array_equal(new, old[order])


# ---- Arguments


@pytest.mark.parametrize(
    "parents",
    [
        [0, -1, -1, -1, -1, -1],
        [-1, -1, 0, -1, -1, -1],
        [-1, -1, -1, -1, 5, -1],
        [-1, -1, -1, -1, -1, 5],
        [-1, -1, -1, 2, 3, 6],
        [-1, -1, -1, 1, 3, 3],
        [-1, -1, -1, -2, -1, -1],
        [-1, -1, -1, 2, 2**31 - 1, 3],
        [-1, -1, -1, 2, -(2**31), 3],
        [-1, -1, 1, -1, 3, 2],
        [0, 0, 0, 0, 0, 0],
    ],
)
def test_rows_that_make_no_tree(native, parents):
    """Two sequences of three rows each. A row follows an earlier one of its own sequence's tree."""
    layer = Layer()
    sequences = [make_sequence(layer, 9, i) for i in range(2)]
    step = Step(Cache(native, layer, sequences), [(0, 6, 3), (1, 6, 3)], parents)
    with pytest.raises(EngineError, match=r"sequence [01] has the rows .* cannot follow"):
        native.check(native.lib.oct_attention(native.pool, step.args, step.seqs))


@pytest.mark.parametrize(
    "sources, target, blocks, message",
    [
        ([3, 3], 1, None, "slot 3 cannot move to 2 after 3"),
        ([5, 4], 1, None, "slot 4 cannot move to 2 after 5"),
        ([5], 6, None, "slot 5 cannot move to 6"),
        ([-1], -5, None, "no slot -1"),
        ([2], -1, None, "no slot -1"),
        ([64], 1, None, "no slot 64 in a table of 2 blocks of 32"),
        ([2**31 - 1], 1, None, "no slot 2147483647"),
        ([33], 1, [0, 5], "slot 33 is in block 5, which does not exist: there are 5"),
        ([33], 1, [-1, 0], "slot 1 is in block -1"),
    ],
)
def test_moves_that_cannot_be(native, sources, target, blocks, message):
    layer = Layer()
    cache = Cache(native, layer, [make_sequence(layer, 60, 5)])
    before = cache.memory.copy()
    with pytest.raises(EngineError, match=message):
        move(cache, sources, target, blocks=blocks)
    assert np.array_equal(cache.memory, before)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_format": 9}, "no KV chunks of format 9"),
        ({"head_dim": 20}, "head size 20"),
        ({"block_size": 24}, "multiples of 16"),
        ({"layer_bytes": 64}, "64 bytes each"),
        ({"block_bytes": 64}, "64 in a block"),
        ({"num_kv_heads": 0}, "0 heads"),
        ({"num_layers": -1}, "-1 layers"),
        ({"kv": None}, "1 layers of 2 heads"),
    ],
)
def test_memory_that_cannot_be(native, change, message):
    layer = Layer()
    cache = Cache(native, layer, [make_sequence(layer, 60, 5)])
    memory = memory_of(cache)
    for name, value in change.items():
        setattr(memory, name, value)
    with pytest.raises(EngineError, match=message):
        move(cache, [5], 1, memory)
