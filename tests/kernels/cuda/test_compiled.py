"""What becomes of the kernels on GPUs: compiled as they would be launched there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from paged_steps import Shape, paged_step
from triton_tools import SHARED_LIMIT, Compiled, launches

from octavo.kernels.cuda.attention import (
    Scoring,
    StepTables,
    decode_attention,
    decode_tiles,
    paged_attention,
    prefill_tiles,
    split_scratch,
)
from octavo.kernels.cuda.kv_copy import copy_blocks
from octavo.kernels.cuda.kv_write import HeadNorms, Rope, write_kv

CPU = torch.device("cpu")
# Two registers that are put aside once are none that a loop waits for.
FEW_BYTES = 16

CASES = [
    (Shape(group=4, head_dim=128, kv="bfloat16"), 80),
    (Shape(group=4, head_dim=128, kv="bfloat16"), 89),
    (Shape(group=4, head_dim=128, kv="bfloat16"), 90),
    (Shape(group=4, head_dim=128, kv="bfloat16"), 100),
    (Shape(group=2, head_dim=256, kv="bfloat16"), 90),
    (Shape(group=8, head_dim=96, kv="int8"), 80),
    (Shape(group=4, head_dim=128, kv="fp8"), 90),
]
SCORING = Scoring(0.1, window=1000, sinks=torch.zeros(16))


def step_of(shape: Shape):
    step = paged_step([(16, 1), (1, 1)], shape, table_width=128)
    step.q = step.q.bfloat16()
    return step, StepTables(step.block_tables, step.query_start, step.seq_lens)


def fits(made: Compiled, arch: int) -> bool:
    return made.spills <= FEW_BYTES and made.shared <= SHARED_LIMIT[arch]


@pytest.mark.parametrize(("shape", "arch"), CASES, ids=str)
def test_rows_fit_and_use_tensor_cores(shape, arch):
    step, tables = step_of(shape)
    is_coded = shape.kv != "bfloat16"
    tiles = prefill_tiles(shape.head_dim, 2, shape.group, arch, is_coded)
    out = torch.empty_like(step.q)
    (launch,) = launches(lambda: paged_attention(step.q, *step.caches, tables, SCORING, out, tiles))
    made = launch.compiled(arch)
    assert fits(made, arch)
    words = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
    assert words[arch] in made.ptx


@pytest.mark.parametrize(("shape", "arch"), CASES, ids=str)
def test_splits_fit_and_their_states_are_seen_by_the_last(shape, arch):
    step, tables = step_of(shape)
    tiles = decode_tiles(shape.head_dim, 2, shape.group)
    scratch = split_scratch(2, 2, shape.head_dim, 1 << 15, tiles, CPU, num_processors=132)
    out = torch.empty_like(step.q)
    (launch,) = launches(
        lambda: decode_attention(step.q, *step.caches, tables, SCORING, out, tiles, scratch)
    )
    assert launch.grid == (2, 2, 66)
    made = launch.compiled(arch)
    assert fits(made, arch) and "mma.sync" in made.ptx
    # Saved by all threads, then counted by one; the last one reads past its own cache.
    before, after = made.ptx.split("atom.global.gpu.acq_rel.add")
    assert "bar.sync" in before[before.rindex("st.global") :]
    assert "ld.global.cg" in after and "ld.global.cg" not in before


@pytest.mark.parametrize(("kv", "arch"), [("bfloat16", 100), ("int8", 90), ("fp8", 80)])
def test_writing_fuses_nothing_that_rounds_less(kv, arch):
    step, _ = step_of(Shape(group=2, head_dim=128, kv=kv))
    weight, tokens = torch.ones(128), torch.zeros(100, dtype=torch.int64)
    norms, rope = HeadNorms(weight, weight, 1e-6), Rope(torch.zeros(50, 128))
    qkv = torch.zeros(100, 8 * 128).bfloat16()
    q = torch.zeros(100, 4, 128).bfloat16()
    (launch,) = launches(lambda: write_kv(qkv, tokens, tokens, *step.caches, q, norms, rope))
    made = launch.compiled(arch)
    assert fits(made, arch) and "fma.rn.f32" not in made.ptx


def test_copies_are_of_16_bytes():
    memory, pairs = torch.zeros(2, 4, 16, 2, 64), torch.zeros(2, 3, dtype=torch.int32)
    (launch,) = launches(lambda: copy_blocks(memory, *pairs))
    made = launch.compiled(80)
    assert "ld.global.v4" in made.ptx and "st.global.v4" in made.ptx
