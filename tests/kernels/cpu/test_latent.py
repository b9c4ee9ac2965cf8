"""Native latent attention: against keys and values that are expanded, and with itself."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

import numpy as np
import pytest
from native_attention import Native
from native_latents import (
    FORMATS,
    Cache,
    Layer,
    Sequence,
    Step,
    attend,
    attend_all,
    expected,
    expected_rows,
    make_sequence,
)

from octavo.base.errors import EngineError
from octavo.kernels.cpu import abi, layout
from octavo.kernels.cpu.library import Pool, load, runnable

# Largest error of stored numbers, relative to the largest of all.
STORED = {"f32": 1e-6, "bf16": 2**-8, "int8": 1 / 253, "fp8": 1 / 15.9}
# Largest error of an output, relative to the largest: of products of bfloat16, in which queries and
# weights are rounded, and rows that are codes; otherwise of the order of sums alone.
EXACT, ROUNDED = 5e-6, 1.2e-2
# The library's own word for a format, and that of results.
DTYPES = {"f32": "float32", "bf16": "bfloat16", "int8": "int8", "fp8": "fp8"}


def check_close(layer: Layer, actual: np.ndarray, wanted: np.ndarray) -> None:
    tolerance = EXACT if layer.kv == "f32" and layer.weights_in != "bf16" else ROUNDED
    error = np.abs(actual - wanted).max() / np.abs(wanted).max()
    assert error <= tolerance, f"relative error {error:.2e}"


def check_prompt(native, layer: Layer, length: int) -> None:
    """A whole prompt: what is stored, and what comes out of it."""
    sequence = make_sequence(layer, length, seed=1)
    cache = Cache(native, layer, [sequence])
    (out,) = attend(cache, [(0, 0, length)])
    rows, wanted = cache.read(0, length), expected_rows(layer, sequence)
    for part in (slice(0, layer.rank), slice(layer.rank, None)):
        most = np.abs(wanted[:, part]).max()
        assert np.abs(rows[:, part] - wanted[:, part]).max() <= STORED[layer.kv] * most
    check_close(layer, out, expected(layer, sequence, rows))


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("length", [1, 16, 63, 65, 130, 300])
def test_prompts(native, kv, length):
    check_prompt(native, Layer(kv=kv), length)


SHAPES = {
    "one head": Layer(heads=1),
    "two vectors": Layer(heads=32),
    "three vectors, the last with one head": Layer(heads=33),
    "odd sizes": Layer(heads=3, rank=27, rope=6, nope=5, value=9),
    "smallest": Layer(heads=2, rank=1, rope=2, nope=1, value=1),
    "halves": Layer(interleaved=False),
    "weights in float16": Layer(weights_in="f16"),
    "weights in bfloat16": Layer(weights_in="bf16"),
    "weights in bfloat16, odd sizes": Layer(rank=27, nope=5, value=9, weights_in="bf16"),
    "DeepSeek-V2-Lite": Layer(heads=16, rank=512, rope=64, nope=128, value=128),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
def test_shapes(native, name, kv):
    check_prompt(native, replace(SHAPES[name], kv=kv), 37 if SHAPES[name].rank > 100 else 90)


def test_a_row_has_each_number_once(native):
    """576 of them in DeepSeek-V2 and V3, however many heads there are."""
    for kv, size in {"f32": 4, "bf16": 2, "int8": 1, "fp8": 1}.items():
        scales = 8 if size == 1 else 0
        found = native.check(native.lib.oct_latent_row_bytes(FORMATS[kv], 512, 64))
        assert found == 576 * size + scales == layout.latent_row_bytes(DTYPES[kv], 512, 64)
    with pytest.raises(EngineError, match="no latent rows of format 4"):
        native.check(native.lib.oct_latent_row_bytes(abi.OCT_KV_INT4, 512, 64))


@pytest.mark.thinned_on_scalar(1)
@pytest.mark.parametrize("kv", ["f32", "fp8"])
def test_a_ragged_batch_with_long_contexts(native, kv):
    """Prompts, continued prompts, and single tokens around the borders of splits."""
    layer = Layer(kv=kv, heads=3)
    lengths, new = [255, 256, 257, 513, 780, 40, 300], [1, 1, 1, 1, 1, 40, 33]
    sequences = [make_sequence(layer, length, i) for i, length in enumerate(lengths)]
    cache = Cache(native, layer, sequences)
    before = [length - count for length, count in zip(lengths, new, strict=True)]
    attend(cache, [(i, 0, count) for i, count in enumerate(before) if count])
    outs = attend(cache, [(i, *chunk) for i, chunk in enumerate(zip(before, new, strict=True))])
    for i, (sequence, count, out) in enumerate(zip(sequences, new, outs, strict=True)):
        wanted = expected(layer, sequence, cache.read(i, len(sequence)), last=count)
        check_close(layer, out, wanted)


# ---- Bit by bit

INVARIANT = {
    "f32": Layer(),
    "bf16": Layer(kv="bf16", heads=16, weights_in="bf16"),
    "int8": Layer(kv="int8", heads=33, rank=16),
    "fp8": Layer(kv="fp8", heads=3, rank=21, weights_in="bf16"),
}


@pytest.mark.thinned_on_scalar(1)
@pytest.mark.parametrize("name", INVARIANT)
def test_nothing_but_a_sequence_itself_matters(native, make_pool, name):
    """Cut into chunks, in company, by other numbers of threads, in other blocks: the same bits."""
    layer, length = INVARIANT[name], 300
    sequence = make_sequence(layer, length, 1)
    wanted = attend_all(native, layer, sequence)

    for size in (7, 257):
        cache = Cache(native, layer, [sequence])
        starts = range(0, length, size)
        parts = [attend(cache, [(0, at, min(size, length - at))])[0] for at in starts]
        assert np.array_equal(np.concatenate(parts), wanted), f"in chunks of {size}"
    other = replace(layer, block_size=64)
    assert np.array_equal(attend_all(native, other, sequence, make_pool(3)), wanted)

    mates = [make_sequence(layer, n, 2) for n in (1, 33, 290)]
    cache = Cache(native, layer, [mates[0], sequence, mates[1], mates[2]], seed=9)
    attend(cache, [(1, 0, 280), (3, 0, 250)])
    outs = attend(cache, [(0, 0, 1), (1, 280, 20), (2, 0, 33), (3, 250, 40)])
    assert np.array_equal(outs[1], wanted[280:])
    assert np.array_equal(outs[3], attend_all(native, layer, mates[2])[250:])


@pytest.mark.thinned_on_scalar(1)
@pytest.mark.parametrize("kv", FORMATS)
def test_decoding_token_by_token_is_the_same_as_a_prompt(native, make_pool, kv):
    layer = Layer(kv=kv, heads=3, rank=16)
    lengths, count = (530, 250, 300), 6
    sequences = [make_sequence(layer, length, i) for i, length in enumerate(lengths)]
    wanted = [attend_all(native, layer, sequence) for sequence in sequences]
    pools = [native.pool, make_pool(1), make_pool(3)]
    cache = Cache(native, layer, sequences)
    attend(cache, [(i, 0, length - count) for i, length in enumerate(lengths)])
    for t in range(count):
        chunks = [(i, length - count + t, 1) for i, length in enumerate(lengths)]
        if t % 2:  # alone: cut by splits
            outs = [attend(cache, [chunk], pools[t % 3])[0] for chunk in chunks]
        else:
            outs = attend(cache, chunks, pools[t % 3])
        for out, all_, (_, position, _) in zip(outs, wanted, chunks, strict=True):
            assert np.array_equal(out[0], all_[position]), f"position {position}"


def test_a_step_that_is_attended_in_parts(native):
    """Queries of 2000 heads take so much room that 20 tokens are two parts."""
    layer = Layer(heads=2000, rank=160, rope=2, nope=1, value=1)
    sequence = make_sequence(layer, 20, 3)
    cache = Cache(native, layer, [sequence])
    parts = [attend(cache, [(0, at, 5)])[0] for at in range(0, 20, 5)]
    assert np.array_equal(attend_all(native, layer, sequence), np.concatenate(parts))


@pytest.mark.parametrize("kv", FORMATS)
def test_all_instruction_sets_agree(kv):
    """To the bit, but where the processor multiplies bfloat16: that has a rounding of its own."""
    rounding = () if kv == "f32" else ("avx512bf16", "neoni8mm")
    levels = [isa for isa in runnable() if isa not in rounding]
    if len(levels) < 2:
        pytest.skip("there is nothing to compare with")
    layer = Layer(kv=kv, heads=20, weights_in="f16")
    sequence = make_sequence(layer, 140, 1)
    outs = []
    for isa in levels:
        library = load(isa)
        with Pool(library, 2) as pool:
            outs.append(attend_all(Native(library, pool), layer, sequence))
    for isa, out in zip(levels, outs, strict=True):
        assert np.array_equal(out, outs[0]), f"{isa} and {levels[0]}"


# ---- Drafts that are trees


@pytest.mark.thinned_on_scalar(1)
@pytest.mark.parametrize("num_known", [1, 30, 62, 64, 250])
def test_a_row_of_a_tree_sees_its_path_alone(native, num_known):
    layer, rng = Layer(kv="bf16", heads=17), random.Random(num_known)
    tree = [rng.randint(max(-1, index - 4), index - 1) for index in range(12)]
    sequence = make_sequence(layer, num_known + len(tree), 0)
    cache = Cache(native, layer, [sequence])
    if num_known > 1:
        attend(cache, [(0, 0, num_known - 1)])
    parents = [-1, *(1 + parent for parent in tree)]
    (out,) = attend(cache, [(0, num_known - 1, 1 + len(tree))], None, parents)
    for index in range(-1, len(tree)):
        slots, at = [], index
        while at >= 0:
            slots.insert(0, num_known + at)
            at = tree[at]
        slots = [*range(num_known), *slots]
        path = Sequence(sequence.q[slots], sequence.ckv[slots], sequence.blocks)
        assert np.array_equal(out[1 + index], attend_all(native, layer, path)[-1])


# ---- Damage


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("where", [3, 35])
@pytest.mark.parametrize("damage", [np.nan, np.inf])
def test_damage_stays_with_those_who_see_it(native, kv, where, damage):
    """A number of a row that is none, in either part, reaches its token and all later ones."""
    layer = Layer(kv=kv)
    sequences = [make_sequence(layer, length, 1) for length in (40, 70, 20)]
    chunks = [(0, 0, 40), (1, 0, 70), (2, 0, 20)]
    clean = attend(Cache(native, layer, sequences), chunks)
    sequences[1].ckv[25, where] = damage
    outs = attend(Cache(native, layer, sequences), chunks)
    assert np.array_equal(outs[0], clean[0])
    assert np.array_equal(outs[2], clean[2])
    assert np.array_equal(outs[1][:25], clean[1][:25])
    assert not np.isfinite(outs[1][25:]).any()


# ---- Arguments


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 0}, "0 heads"),
        ({"rope_dim": 7}, "rows of 39"),
        ({"rank": 5000}, "rows of 5008"),
        ({"kv_format": abi.OCT_KV_K8V4}, "no rows of KV format 5"),
        ({"weight_format": abi.OCT_W4S}, "of format 4"),
        ({"kv_block_bytes": 64}, "64 bytes from block to block, each has"),
        ({"ldckv": 10}, "100, 10 and 100 floats apart, too few"),
        ({"value_up": None}, "NULL"),
    ],
)
def test_bad_arguments(native, change, message):
    layer = Layer()
    step = Step(Cache(native, layer, [make_sequence(layer, 5, 0)]), [(0, 0, 5)])
    for name, value in change.items():
        setattr(step.args, name, value)
    with pytest.raises(EngineError, match=message):
        native.check(
            native.lib.oct_latent(native.pool, ctypes.byref(step.args), ctypes.byref(step.seqs))
        )
