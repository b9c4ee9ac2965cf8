"""Native paged attention: against float64 over the stored keys and values, and with itself."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from native_attention import (
    FORMATS,
    Cache,
    Layer,
    Native,
    Step,
    attend,
    attend_all,
    expected,
    expected_heads,
    hadamard,
    make_sequence,
)

from octavo.base.errors import EngineError
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.library import Pool, load, runnable

# Largest error of an output relative to the largest value: rounding of queries and weights (of keys
# and values there is none, as the oracle reads what was stored; and it rounds queries to one byte
# itself where they are).
TOLERANCE = {"f32": 5e-6, "bf16": 1e-2, "int8": 1e-3, "fp8": 1e-5, "int4": 1e-3, "k8v4": 1e-3}
# Largest error of stored keys and values, relative to the largest of all. Those with scales
# are compared to the bit in test_kv_formats.py.
STORED = {
    "f32": (2e-6, 2e-6),
    "bf16": (2**-8, 2**-8),
    "int8": (1 / 253, 1 / 253),
    "fp8": (1 / 15.9, 1 / 15.9),
    "int4": (1 / 14, 1 / 14),
    "k8v4": (1 / 253, 1 / 14),
}


def check_close(actual: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    assert np.isfinite(actual).all()
    error = np.abs(actual - wanted).max() / np.abs(wanted).max()
    assert error <= tolerance, f"relative error {error:.2e}"


def check_prompt(native, layer: Layer, length: int) -> None:
    """A whole prompt: what is stored, and what comes out."""
    sequence = make_sequence(layer, length, seed=1)
    cache = Cache(native, layer, [sequence])
    (out,) = attend(cache, [(0, 0, length)])
    keys, values = cache.read_padded(0, length)
    of_keys, of_values = STORED[layer.kv]
    zeros = ((0, 0), (0, 0), (0, layer.padded - layer.dim))
    wanted = np.pad(expected_heads(layer, sequence.k, "k_norm"), zeros)
    # What was rounded are the rotated keys.
    rotation = np.eye(layer.padded) if layer.kv in ("f32", "bf16") else hadamard(layer.dim)
    assert np.abs((keys - wanted) @ rotation).max() <= of_keys * np.abs(wanted @ rotation).max()
    assert np.abs(values - np.pad(sequence.v, zeros)).max() <= of_values * np.abs(sequence.v).max()
    check_close(out, expected(layer, sequence, *cache.read(0, length)), TOLERANCE[layer.kv])


# ---- Against the oracle


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 130, 257])
def test_prompts(native, kv, length):
    check_prompt(native, Layer(kv=kv), length)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 112, 128, 256, 288, 320, 512])
def test_head_sizes(native, kv, dim):
    check_prompt(native, Layer(kv=kv, dim=dim, rotary=dim, heads=3, kv_heads=1), 37)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("dim", [1, 2, 8, 15, 24, 40, 100, 130, 250, 500])
def test_head_sizes_that_are_padded(native, kv, dim):
    """Several heads, as each begins where the one before ends, with and without norms and rope."""
    layer = Layer(kv=kv, dim=dim, rotary=dim // 2 * 2, heads=4, kv_heads=2)
    check_prompt(native, layer, 37)
    check_prompt(native, replace(layer, rotary=dim // 4 * 2, interleaved=True, qk_norm=True), 21)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 71])
def test_groups(native, kv, group):
    layer = Layer(kv=kv, dim=16, rotary=16, heads=2 * group, kv_heads=2)
    check_prompt(native, layer, 21)


VARIANTS = {
    "window 1": Layer(window=1),
    "window 5": Layer(window=5),
    "window 16": Layer(window=16),
    "window 100": Layer(window=100),
    "softcap": Layer(softcap=5.0),
    "sinks": Layer(sinks=True),
    "no rope": Layer(rotary=0),
    "partial rope": Layer(rotary=20),
    "interleaved rope": Layer(interleaved=True),
    "partial interleaved rope": Layer(rotary=10, interleaved=True),
    "norms": Layer(qk_norm=True),
    "all": Layer(window=70, softcap=8.0, sinks=True, rotary=12, qk_norm=True, dim=48),
}


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(native, kv, name):
    check_prompt(native, replace(VARIANTS[name], kv=kv), 150)


@pytest.mark.thinned_on_scalar(3)
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("window", [0, 300])
def test_a_ragged_batch_with_long_contexts(native, kv, window):
    """Prompts, continued prompts, and single tokens around the borders of splits."""
    layer = Layer(kv=kv, window=window, heads=3, kv_heads=1, dim=16, rotary=16)
    lengths = [255, 256, 257, 511, 513, 780, 40, 400]
    new = [1, 1, 1, 1, 1, 1, 40, 33]
    sequences = [make_sequence(layer, length, i) for i, length in enumerate(lengths)]
    cache = Cache(native, layer, sequences)
    before = [length - count for length, count in zip(lengths, new, strict=True)]
    attend(cache, [(i, 0, count) for i, count in enumerate(before) if count])
    outs = attend(cache, [(i, *chunk) for i, chunk in enumerate(zip(before, new, strict=True))])
    for i, (sequence, count, out) in enumerate(zip(sequences, new, outs, strict=True)):
        wanted = expected(layer, sequence, *cache.read(i, len(sequence)), last=count)
        check_close(out, wanted, TOLERANCE[kv])


def test_one_large_dimension_leaves_the_others_their_bits(native):
    """A dimension of the keys that is 50 times the others, in which queries are small: without the
    rotation, one scale would leave the others two bits, and the error would be 0.15."""
    layer = Layer(kv="int8", dim=64, rotary=0)
    sequence = make_sequence(layer, 200, 2)
    sequence.k[..., 7] += 50
    sequence.q[..., 7] /= 50
    cache = Cache(native, layer, [sequence])
    (out,) = attend(cache, [(0, 0, 200)])
    exact = expected(replace(layer, kv="f32"), sequence, sequence.k, sequence.v)
    error = np.sqrt(((out - exact) ** 2).mean() / (exact**2).mean())
    print(f"relative error {error:.2e}")
    assert error < 0.05


@pytest.mark.parametrize("interleaved", [False, True])
def test_float32_agrees_with_the_reference_ops(native, interleaved):
    torch = pytest.importorskip("torch")
    from octavo.kernels import reference
    from octavo.kernels.kv_stores import FloatCodec, KVStore

    layer = Layer(kv="f32", window=90, softcap=9.0, sinks=True, qk_norm=True, rotary=24,
                  interleaved=interleaved)  # fmt: skip
    length = 200
    sequence = make_sequence(layer, length, 3)
    cache = Cache(native, layer, [sequence])
    (out,) = attend(cache, [(0, 0, length)])

    weights = {name: torch.from_numpy(value) for name, value in layer.weights().items()}
    q, k, v = (torch.from_numpy(getattr(sequence, name)) for name in "qkv")
    q = reference.rmsnorm(q, weights["q_norm"], 1e-6)
    k = reference.rmsnorm(k, weights["k_norm"], 1e-6)
    positions = torch.arange(length)
    q, k = reference.rope(q, k, positions, weights["cos_sin"], interleaved)
    codec = FloatCodec(torch.float32)
    caches = [KVStore(codec, [torch.zeros(7, 32, layer.kv_heads, layer.dim)]) for _ in range(2)]
    reference.store_kv(k, v, *caches, positions)
    plan = reference.plan_attention(
        torch.arange(7, dtype=torch.int32)[None],
        torch.tensor([0, length], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        length,
        length,
        32,
    )
    wanted = reference.paged_attention(
        q, *caches, plan, layer.scale, layer.window, layer.softcap, weights["sinks"]
    )
    assert np.abs(out - wanted.numpy()).max() <= 1e-5
    keys, values = cache.read(0, length)
    assert np.abs(keys - k.numpy()).max() <= 1e-5 * np.abs(keys).max()
    assert np.array_equal(values, v.numpy())


# ---- Bit by bit


INVARIANT = {
    "bf16": Layer(),
    "f32": Layer(kv="f32", heads=5, kv_heads=1),
    "int8": Layer(kv="int8", heads=3, kv_heads=1),
    "fp8": Layer(kv="fp8", heads=5, kv_heads=1),
    "int4": Layer(kv="int4", heads=5, kv_heads=1, dim=48),
    "k8v4": Layer(kv="k8v4", heads=3, kv_heads=1, dim=64),
    "padded": Layer(kv="int4", heads=3, kv_heads=1, dim=40, qk_norm=True),
    "large": Layer(kv="int8", heads=3, kv_heads=1, dim=512),
    "window": Layer(window=130, sinks=True),
    "softcap": Layer(softcap=3.0, qk_norm=True, heads=14),
}


@pytest.mark.thinned_on_scalar(3)
@pytest.mark.parametrize("name", INVARIANT)
def test_nothing_but_a_sequence_itself_matters(native, make_pool, name):
    """Cut into chunks, in company, by other numbers of threads, in other blocks: the same bits."""
    layer, length = INVARIANT[name], 300
    sequence = make_sequence(layer, length, 1)
    wanted = attend_all(native, layer, sequence)

    for size in (7, 64, 257):
        cache = Cache(native, layer, [sequence])
        starts = range(0, length, size)
        parts = [attend(cache, [(0, at, min(size, length - at))])[0] for at in starts]
        assert np.array_equal(np.concatenate(parts), wanted), f"in chunks of {size}"
    for threads, block_size in ((1, 16), (3, 64)):
        other = replace(layer, block_size=block_size)
        assert np.array_equal(attend_all(native, other, sequence, make_pool(threads)), wanted)

    mates = [make_sequence(layer, n, 2) for n in (1, 33, 290)]
    cache = Cache(native, layer, [mates[0], sequence, mates[1], mates[2]], seed=9)
    attend(cache, [(1, 0, 280), (3, 0, 250)])
    outs = attend(cache, [(0, 0, 1), (1, 280, 20), (2, 0, 33), (3, 250, 40)])
    assert np.array_equal(outs[1], wanted[280:])
    assert np.array_equal(outs[3], attend_all(native, layer, mates[2])[250:])


@pytest.mark.thinned_on_scalar(2)
@pytest.mark.parametrize("kv", FORMATS)
def test_decoding_token_by_token_is_the_same_as_a_prompt(native, make_pool, kv):
    layer = Layer(kv=kv, heads=3, kv_heads=1, dim=16, rotary=16, window=600)
    lengths = (780, 250, 523)
    sequences = [make_sequence(layer, length, i) for i, length in enumerate(lengths)]
    wanted = [attend_all(native, layer, sequence) for sequence in sequences]
    pools = [native.pool, make_pool(1), make_pool(3)]
    cache = Cache(native, layer, sequences)
    count = 8
    attend(cache, [(i, 0, length - count) for i, length in enumerate(lengths)])
    for t in range(count):
        chunks = [(i, length - count + t, 1) for i, length in enumerate(lengths)]
        if t % 2:  # alone: cut by splits
            outs = [attend(cache, [chunk], pools[t % 3])[0] for chunk in chunks]
        else:
            outs = attend(cache, chunks, pools[t % 3])
        for out, all_, (_, position, _) in zip(outs, wanted, chunks, strict=True):
            assert np.array_equal(out[0], all_[position]), f"position {position}"


@pytest.mark.parametrize("kv", FORMATS)
def test_all_instruction_sets_agree(kv):
    """To the bit, but for bfloat16 where the processor multiplies it."""
    rounding = ("avx512bf16", "neoni8mm") if kv == "bf16" else ()  # of their own
    levels = [isa for isa in runnable() if isa not in rounding]
    if len(levels) < 2:
        pytest.skip("there is nothing to compare with")
    layer = Layer(kv=kv, window=120, softcap=5.0, sinks=True, qk_norm=True, heads=5, kv_heads=1)
    sequence = make_sequence(layer, 140, 1)
    outs = []
    for isa in levels:
        library = load(isa)
        with Pool(library, 2) as pool:
            outs.append(attend_all(Native(library, pool), layer, sequence))
    for isa, out in zip(levels, outs, strict=True):
        assert np.array_equal(out, outs[0]), f"{isa} and {levels[0]}"


# ---- Damage


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("damage", [np.nan, np.inf])
def test_damage_stays_with_those_who_see_it(native, kv, where, damage):
    """A NaN at a position reaches that query, or that and all later ones of the sequence."""
    layer = Layer(kv=kv)
    sequences = [make_sequence(layer, length, 1) for length in (40, 70, 20)]
    clean = attend(Cache(native, layer, sequences), [(0, 0, 40), (1, 0, 70), (2, 0, 20)])
    at, head = 25, 0
    damaged = replace(sequences[1], **{where: getattr(sequences[1], where).copy()})
    getattr(damaged, where)[at, head, 3] = damage
    sequences[1] = damaged
    outs = attend(Cache(native, layer, sequences), [(0, 0, 40), (1, 0, 70), (2, 0, 20)])
    for i in (0, 2):
        assert np.array_equal(outs[i], clean[i])
    assert np.array_equal(outs[1][:at], clean[1][:at])
    # Query heads 0, 1 and 2 share key head 0.
    seen = outs[1][at:, :3] if where != "q" else outs[1][at, :1]
    assert not np.isfinite(seen).all(axis=-1).any()
    assert np.array_equal(outs[1][:, 3:], clean[1][:, 3:])
    if where == "q":
        assert np.array_equal(outs[1][at + 1 :], clean[1][at + 1 :])


@pytest.mark.parametrize("kv", FORMATS)
def test_slots_that_were_never_written_do_not_matter(native, kv):
    """A block shared with a longer sequence that was NaN there; blocks freed before the window."""
    layer = Layer(kv=kv, window=40)
    sequence = make_sequence(layer, 101, 4)
    wanted = attend_all(native, layer, sequence)
    cache = Cache(native, layer, [sequence])
    attend(cache, [(0, 0, 100)])
    sequence.blocks[: (100 - 40) // layer.block_size] = -1  # freed
    (out,) = attend(cache, [(0, 100, 1)])
    assert np.array_equal(out[0], wanted[100])


# ---- Arguments


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 7}, "7 query heads cannot share 2 key heads"),
        ({"num_kv_heads": 0}, "cannot share 0"),
        ({"head_dim": 40}, "head size is 40"),
        ({"head_dim": 528}, "head size is 528"),
        ({"kv_format": 9}, "no KV format 9"),
        ({"rotary_dim": 7}, "7 of 32 dimensions"),
        ({"rotary_dim": 34}, "34 of 32 dimensions"),
        ({"window": -1}, "window -1"),
        ({"kv_block_bytes": 64}, "64 bytes from block to block, each has"),
        ({"ldk": 10}, "10 and 320 floats apart, too few"),
        ({"q": None}, "NULL"),
        ({"cos_sin": None}, "NULL"),
    ],
)
def test_bad_arguments(native, change, message):
    layer = Layer()
    step = Step(Cache(native, layer, [make_sequence(layer, 5, 0)]), [(0, 0, 5)])
    for name, value in change.items():
        setattr(step.args, name, value)
    with pytest.raises(EngineError, match=message):
        native.check(
            native.lib.oct_attention(native.pool, ctypes.byref(step.args), ctypes.byref(step.seqs))
        )


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("kv_len", [3], "5 new tokens, but 3 in all"),
        ("kv_len", [65], "65 positions, but its table is 2 blocks of 32"),
        ("q_start", [2, 1], "tokens 2 to 1"),
        ("q_start", [0, 4], "the step has 3"),
        ("table", [[-2, 0]], "block -2"),
        ("table", [[4, 0]], "block 4, which does not exist: there are 4"),
        ("block_size", 24, "multiples of 16"),
    ],
)
def test_bad_sequences(native, name, value, message):
    layer = Layer()
    step = Step(Cache(native, layer, [make_sequence(layer, 5, 0)]), [(0, 0, 5)])
    if name == "block_size":
        step.seqs.block_size = value
    else:
        getattr(step, name)[...] = value
    if value == [0, 4]:
        step.seqs.num_tokens = 3
    with pytest.raises(EngineError, match=message):
        native.check(
            native.lib.oct_attention(native.pool, ctypes.byref(step.args), ctypes.byref(step.seqs))
        )


def test_reading_a_sequence_that_is_not_there(native):
    layer = Layer()
    step = Step(Cache(native, layer, [make_sequence(layer, 5, 0)]), [(0, 0, 5)])
    with pytest.raises(EngineError, match="no sequence 1"):
        native.check(native.lib.oct_kv_read(step.args, step.seqs, 1, None, None))
    with pytest.raises(EngineError, match="no KV chunks of format 0 and head size 40"):
        native.check(native.lib.oct_kv_chunk_bytes(abi.OCT_KV_F32, 40))
