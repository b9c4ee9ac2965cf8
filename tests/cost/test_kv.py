from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import spec_of
from octavo.cost.kv import attention_ops, kv_bytes_per_token, sequence_bytes
from octavo.cost.kv_type import kv_type
from octavo.cost.precision import precision_of
from octavo.cost.shares import shares
from octavo.kernels.cpu.layout import kv_token_bytes, latent_row_bytes

MIB = 1 << 20


def per_token(name: str, tp: int = 1, dtype: str | None = None) -> float:
    spec = spec_of(name)
    return kv_bytes_per_token(spec, precision_of(spec, kv_cache_dtype=dtype), shares(tp))


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        *(("llama-2-70b", 327_680), ("llama-3-70b", 327_680)),  # R02
        ("llama-3.1-8b", 131_072),  # R03
        *(("deepseek-v2", 69_120), ("deepseek-v3", 70_272)),  # R05
        ("mistral-small-24b", 163_840),  # R06
        ("qwen3.6-27b", 65_536),  # R07
        *(("gpt-3-175b", 4_718_592), ("llama-2-7b", 524_288)),
        ("qwen3.6-35b-a3b", 20_480),
        ("deepseek-v3.2", 61 * (512 + 64 + 128) * 2),  # a key of the indexer more
        ("kimi-linear-48b-a3b", 7 * (512 + 64) * 2),
        *(
            ("mamba-2.8b", 0),
            ("lfm2-1.2b", 6 * 2 * 8 * 64 * 2),
            ("jamba-v0.1", 4 * 2 * 8 * 128 * 2),
        ),
        # Ten layers see everything, with 4 heads of 512; others 1,024 positions, 16 heads of 256.
        ("gemma-4-31b", 10 * 2 * 4 * 512 * 2 + 50 * 2 * 16 * 256 * 2),
    ],
)
def test_bytes_of_a_token_are_exact(name, num_bytes):
    assert per_token(name) == num_bytes


def test_caches_of_long_sequences():
    def sequence(name: str, length: int) -> float:
        spec = spec_of(name)
        return sequence_bytes(attention_ops(spec.layers, precision_of(spec)), length)

    assert sequence("llama-2-70b", 4096) == pytest.approx(1.342e9, rel=1e-3)
    assert sequence("llama-2-70b", 131_072) == pytest.approx(42.95e9, rel=1e-3)
    assert sequence("llama-3.1-8b", 131_072) == pytest.approx(17.18e9, rel=1e-3)


def test_states_of_a_hybrid_are_the_same_for_any_length():
    """R07: llama.cpp logs 16,384 MiB for 262,144 cells, and 598.5 MiB for four sequences."""
    spec = spec_of("qwen3.6-27b")
    precision = precision_of(spec)
    assert 262_144 * per_token("qwen3.6-27b") == 16_384 * MIB
    ops = attention_ops(spec.layers, precision)
    states = sum(op.count * op.state_bytes for op in ops)
    assert 4 * states == pytest.approx(598.5 * MIB, rel=1e-6)
    assert sequence_bytes(ops, 1) - per_token("qwen3.6-27b") == states


@pytest.mark.parametrize(
    ("tp", "share"), [(1, 8), (2, 4), (8, 1), (16, 1)]
)  # heads of each device, of 8
def test_heads_are_repeated_where_there_are_more_devices(tp, share):
    assert per_token("llama-3.1-8b", tp) == 131_072 * share / 8


def test_latent_vectors_are_on_every_device():
    assert per_token("deepseek-v3", 8) == per_token("deepseek-v3")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_a_latent_vector_and_its_rotated_key_have_scales_of_their_own(dtype):
    name = dtype if dtype == "bfloat16" else f"octavo-{dtype}"
    assert per_token("deepseek-v3", dtype=name) == 61 * latent_row_bytes(dtype, 512, 64)


def test_windows_bound_what_layers_keep():
    spec = spec_of("gemma-3-27b")  # 10 layers of 62 see everything, others 1,024 positions
    ops = attention_ops(spec.layers, precision_of(spec))
    layer = 2 * 16 * 128 * 2
    long = sequence_bytes(ops, 100_000, step_tokens=2048)
    assert long == layer * (10 * 100_000 + 52 * (1023 + 2048))
    all_kept = sequence_bytes(ops, 100_000, keeps_windows_only=False)
    assert all_kept == layer * 62 * 100_000


@given(
    name=st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "qwen3-next-80b-a3b", "deepseek-v3"]),
    length=st.integers(1, 20_000),
    block=st.sampled_from([1, 16, 256]),
    step=st.integers(1, 4096),
)
def test_a_longer_sequence_never_takes_less(name, length, block, step):
    spec = spec_of(name)
    ops = attention_ops(spec.layers, precision_of(spec))

    def taken(tokens: int) -> float:
        return sequence_bytes(ops, tokens, block_size=block, step_tokens=step)

    assert taken(length) <= taken(length + 1)
    assert taken(length) <= sequence_bytes(ops, length, block_size=block, keeps_windows_only=False)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *(("bfloat16", "bfloat16"), ("float32", "float32"), ("octavo-int8", "int8")),
        *(("octavo-fp8", "fp8"), ("int4", "int4"), ("k8v4", "k8v4")),
    ],
)
@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_types_of_octavo_are_as_its_kernels_keep_them(name, kernels, head_dim):
    assert kv_type(name).token_bytes(1, head_dim, head_dim) == kv_token_bytes(kernels, head_dim)


@pytest.mark.parametrize(
    ("name", "bytes_of_a_number"),
    [("fp8", 1.0), ("int8", 1 + 2 / 128), ("q8_0", 1.0625), ("q4_0", 0.5625), ("fp8_e4m3", 1.0)],
)
def test_types_of_other_engines(name, bytes_of_a_number):
    assert kv_type(name).token_bytes(1, 128, 128) == 256 * bytes_of_a_number


def test_half_the_bytes_in_fp8():
    assert per_token("llama-3.1-8b", dtype="fp8") == 65_536


def test_what_is_wide_is_asked_for():
    """Configs of old models say float32, of files that engines run with 16 bits."""
    spec = spec_of("gpt2")
    assert precision_of(spec).kv.name == "bfloat16"
    assert precision_of(spec, dtype="float32").kv.name == "float32"
    assert precision_of(spec).activation_bytes == 4


def test_unknown_types_are_errors():
    with pytest.raises(ConfigError, match="q4_1 or q4_0"):
        kv_type("q4_2")
