"""What becomes of the kernels on GPUs: compiled as they would be launched there."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

import torch
from paged_steps import Shape, paged_step
from triton_tools import SHARED_LIMIT, Compiled, launches

from octavo.kernels.cuda.attention import (
    AttentionInputs,
    SplitScratch,
    attend_by_rows,
    attend_by_splits,
)
from octavo.kernels.cuda.attention_plan import (
    AttentionLimits,
    AttentionPlanner,
    Cut,
    Gpu,
    HeadShape,
    Scoring,
    StepTables,
    scratch_size,
)
from octavo.kernels.cuda.kv_copy import launch_copies
from octavo.kernels.cuda.kv_write import write_kv
from octavo.kernels.cuda.ops import AttentionLayer, HeadNorms, Rope

CPU = torch.device("cpu")
# Two registers that are put aside once are none that a loop waits for.
FEW_BYTES = 16

CASES = [
    (Shape(group=4, head_dim=128, kv="bfloat16"), 90),
    (Shape(group=8, head_dim=96, kv="int8"), 80),
    *(
        pytest.param(shape, arch, marks=pytest.mark.long)
        for shape, arch in (
            (Shape(group=4, head_dim=128, kv="bfloat16"), 80),
            (Shape(group=4, head_dim=128, kv="bfloat16"), 89),
            (Shape(group=4, head_dim=128, kv="bfloat16"), 100),
            (Shape(group=4, head_dim=128, kv="bfloat16"), 120),
            (Shape(group=2, head_dim=256, kv="bfloat16"), 90),
            (Shape(group=4, head_dim=128, kv="fp8"), 90),
        )
    ),
]
LIMITS = AttentionLimits(max_num_seqs=256, max_query=16, max_seq_len=1 << 15)
SCORING = Scoring(0.1, window=1000, sinks=torch.zeros(16))
TENSOR_CORES = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
TENSOR_CORES[120] = TENSOR_CORES[89]


def step_of(shape: Shape):
    step = paged_step([(16, 1), (1, 1)], shape, table_width=128)
    step.q = step.q.bfloat16()
    return step, StepTables(step.block_tables, step.query_start, step.seq_lens)


def attend_of(shape: Shape, arch: int, max_query: int, is_invariant=False) -> tuple[Cut, Compiled]:
    """As a step of two sequences is cut, and what is launched for it."""
    step, tables = step_of(shape)
    heads = HeadShape.of(step.q, *step.caches)
    planner = AttentionPlanner([heads], LIMITS, Gpu(arch, num_processors=132), is_invariant)
    cut = planner.plan(2, max_query).cuts[heads]
    inputs = AttentionInputs.of_heads(step.q, *step.caches)
    arguments = (inputs, tables, SCORING, torch.empty_like(step.q), cut)
    if cut.num_splits:
        scratch = SplitScratch.of(scratch_size(cut, heads, 2), CPU)
        (launch,) = launches(lambda: attend_by_splits(*arguments, scratch))
        assert launch.grid == (2, 2, cut.num_splits)
    else:
        (launch,) = launches(lambda: attend_by_rows(*arguments))
    return cut, launch.compiled(arch)


def fits(made: Compiled, arch: int) -> bool:
    return made.spills <= FEW_BYTES and made.shared <= SHARED_LIMIT[arch]


@pytest.mark.parametrize(("shape", "arch"), CASES, ids=str)
def test_rows_fit_and_use_tensor_cores(shape, arch):
    cut, made = attend_of(shape, arch, max_query=1000)
    assert not cut.num_splits and fits(made, arch)
    assert TENSOR_CORES[arch] in made.ptx


@pytest.mark.parametrize(("shape", "arch"), CASES, ids=str)
def test_splits_fit_and_their_states_are_seen_by_the_last(shape, arch):
    cut, made = attend_of(shape, arch, max_query=1)
    assert cut.num_splits == 66
    # Two programs at a time on a multiprocessor, but for those that have little shared memory.
    assert fits(made, arch) and "mma.sync" in made.ptx
    assert SHARED_LIMIT[arch] < 100 << 10 or 2 * made.shared <= SHARED_LIMIT[arch]
    # Saved by all threads, then counted by one; the last one reads 16 bytes at a time, past its
    # own cache, and several states ahead.
    before, after = made.ptx.split("atom.global.gpu.acq_rel.add")
    assert "bar.sync" in before[before.rindex("st.global") :]
    assert "cp.async.cg" in after


@pytest.mark.long
@pytest.mark.parametrize(("kv", "arch"), [("int8", 80), ("int8", 90), ("fp8", 80), ("fp8", 90)])
def test_codes_become_floats_without_conversions_of_integers(kv, arch):
    """For which processors have fewer units than for sums; nor is a product with a subnormal
    number 0."""
    _, made = attend_of(Shape(group=4, head_dim=128, kv=kv), arch, max_query=1)
    assert not re.search(r"cvt\.\w+\.(f32|f16|bf16)\.[su]\d+|cvt\.f32\.f16|mul\.ftz", made.ptx)


@pytest.mark.parametrize(("shape", "arch"), CASES, ids=str)
@pytest.mark.parametrize("max_query", [4, 16])
def test_splits_of_drafts_fit(shape, arch, max_query):
    cut, made = attend_of(shape, arch, max_query)
    assert fits(made, arch)
    assert cut.num_splits or shape.group * max_query > 64  # keys are split up to 64 rows


@pytest.mark.parametrize(("shape", "arch"), CASES, ids=str)
def test_invariant_kernels_fit_and_multiply_alike(shape, arch):
    """With instructions of one kind: others may sum in another order."""
    of_one, of_many = (attend_of(shape, arch, n, is_invariant=True) for n in (1, 1000))
    assert of_one[0].tiles == of_many[0].tiles
    kinds = []
    for _, made in (of_one, of_many):
        assert fits(made, arch) and "fma.rn.f32" not in made.ptx
        kinds.append({word for word in TENSOR_CORES.values() if word in made.ptx})
    assert kinds[0] == kinds[1] and kinds[0]


@pytest.mark.long
@pytest.mark.parametrize(("kv", "arch"), [("bfloat16", 100), ("int8", 90), ("fp8", 80)])
def test_writing_fuses_nothing_that_rounds_less(kv, arch):
    step, _ = step_of(Shape(group=2, head_dim=128, kv=kv))
    weight, tokens = torch.ones(128), torch.zeros(100, dtype=torch.int64)
    norms, rope = HeadNorms(weight, weight, 1e-6), Rope(torch.zeros(50, 128))
    qkv = torch.zeros(100, 8 * 128).bfloat16()
    q = torch.zeros(100, 4, 128).bfloat16()
    layer = AttentionLayer(*step.caches, SCORING, norms, rope)
    (launch,) = launches(lambda: write_kv(qkv, tokens, tokens, layer, q))
    made = launch.compiled(arch)
    assert fits(made, arch) and "fma.rn.f32" not in made.ptx


def test_copies_are_of_16_bytes():
    memory, pairs = torch.zeros(2, 4, 16, 2, 64), torch.zeros(3, 2, dtype=torch.int32)
    (launch,) = launches(lambda: launch_copies([memory, memory], pairs))
    assert launch.grid == (1, 2, 2)
    made = launch.compiled(80)
    assert "ld.global.v4" in made.ptx and "st.global.v4" in made.ptx
    assert "cp.async" not in made.ptx  # which would be ahead of what is stored
