"""A whole step by Triton's kernels: against plain torch, and what it launches and allocates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("triton")

import torch
from fused_models import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA,
    LLAMA,
    MAX_LEN,
    MIXTRAL,
    OPT,
    QWEN_2_MOE,
    fused_program,
    random_model,
    step_of,
)
from torch.overrides import TorchFunctionMode
from triton_tools import launches

from octavo.base.errors import ConfigError
from octavo.kernels.cuda.attention_plan import AttentionLimits, Gpu
from octavo.kernels.cuda.triton_ops import create_triton_ops

LIMITS = AttentionLimits(max_num_seqs=32, max_query=4, max_seq_len=MAX_LEN)
TRITON = partial(create_triton_ops, attention=LIMITS, gpu=Gpu(90, 8))
CONFIGS = {
    "llama": replace(LLAMA, num_layers=1, layer_windows=(None,), attention_bias=True),
    "qwen 2 with experts": QWEN_2_MOE,
    "deepseek 3": DEEPSEEK_V3,
    "opt": OPT,
    "gemma": replace(GEMMA, num_layers=2, layer_windows=(9, None), logit_softcap=5.0),
}
# More rows than a product of few rows takes; then fewer, a token each.
STEPS = [step_of((0, 0, 14), (1, 0, 1), (2, 0, 5)), step_of((0, 14, 1), (1, 1, 1), (2, 5, 1))]


def last_logits(program, step, shape, device):
    """Of the last token of each sequence, after a step that is padded to a shape."""
    rows = torch.from_numpy(step.query_start[1:] - 1).to(device, torch.int32)
    out = torch.full((len(rows), program.vocab_size), torch.nan, device=device)
    program.run(step.padded(*shape, device=device))
    program.logits(rows, out)
    assert not program.damaged[: step.query_start[-1]].any()
    return out.cpu()


# Codes may differ by one where sums differ in the last bit.
@pytest.mark.parametrize(
    ("name", "kv", "tolerance"),
    [
        ("llama", "float32", 1e-4),
        ("gemma", "float32", 1e-4),
        ("qwen 2 with experts", "float32", 1e-4),
        ("deepseek 3", "float32", 1e-4),
        ("opt", "float32", 1e-4),
        pytest.param("llama", "int8", 1e-2, marks=pytest.mark.long),
        pytest.param("deepseek 3", "fp8", 1e-2, marks=pytest.mark.long),
    ],
)
def test_the_same_as_plain_torch(name, kv, tolerance, device):
    config, model = CONFIGS[name], random_model(CONFIGS[name])
    plain = fused_program(config, model, kv=kv)
    program = fused_program(config, model, TRITON, kv=kv, device=device)
    for step, shape in zip(STEPS, [(24, 4), (4, 4)], strict=True):
        expected = last_logits(plain, step, shape, "cpu")
        got = last_logits(program, step, shape, device)
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_the_same_bits_in_any_company(device):
    config, model = CONFIGS["llama"], random_model(CONFIGS["llama"])
    invariant = partial(TRITON, is_invariant=True)
    one, many = (fused_program(config, model, invariant, device=device) for _ in range(2))
    for items, chunks in (((0, 0, 14), [(0, 0, 13), (0, 13, 1)]), ((0, 14, 1), [(0, 14, 1)])):
        for chunk in chunks:
            alone = last_logits(one, step_of(chunk), (chunk[2], 1), device)
        step = step_of((2, items[1], items[2] + 4), items)
        assert torch.equal(last_logits(many, step, (48, 3), device)[1:], alone)


class Noting(TorchFunctionMode):
    """Notes which of PyTorch's ops compute, and which make memory that was not there."""

    def __init__(self):
        super().__init__()
        self.computing, self.allocating = Counter(), Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        if isinstance(result, torch.Tensor):
            if any(result is x for x in given):  # in place, or as ``out``
                self.computing[func.__name__] += 1
            elif result.untyped_storage()._cdata not in {x.untyped_storage()._cdata for x in given}:
                self.allocating[func.__name__] += 1
        return result


def launched(config, step, num_rows=4):
    """By name, what a step and some rows of its head launch."""
    program = fused_program(config, random_model(config), TRITON, torch.bfloat16, "bfloat16")
    rows = torch.zeros(num_rows, dtype=torch.int32)
    out = torch.empty(num_rows, program.vocab_size)
    noting = Noting()

    def run():
        with noting:
            program.run(step)
            program.logits(rows, out)

    kernels = Counter(launch.kernel.__name__ for launch in launches(run))
    assert not noting.allocating
    return kernels + noting.computing


def of_a_layer(config, step):
    """What a model of two layers launches more than one of a single layer."""
    one, two = (
        replace(config, num_layers=count, layer_windows=(None,) * count) for count in (1, 2)
    )
    more = launched(two, step)
    more.subtract(launched(one, step))
    return {name: count for name, count in more.items() if count}


DECODE = step_of(*((seq, 3, 1) for seq in range(4))).padded(4, 4)
WIDE_DECODE = step_of(*((seq, 3, 1) for seq in range(6))).padded(32, 32)
PROMPT = step_of((0, 0, 40)).padded(48, 2)
WRITE = {"_write": 1}
FEW_ROWS = {"_linear": 4, "_rmsnorm": 2, **WRITE}
MANY_ROWS = {"_mul": 1, **WRITE}
EXPERTS = {"_choose": 1, "_gather": 1, "_multiply": 2, "_sum_ranks": 1}
# With many rows, products come from cuBLAS: activations are launches of their own.
LAUNCHES = {
    "llama, few rows": (LLAMA, DECODE, FEW_ROWS | {"attend_splits": 1}, 8),
    "llama, many rows": (LLAMA, WIDE_DECODE, MANY_ROWS | {"attend_splits": 1, "_rmsnorm": 2}, 9),
    "llama, prompts": (LLAMA, PROMPT, MANY_ROWS | {"attend_rows": 1, "_rmsnorm": 2}, 9),
    "mixtral, few rows": (
        MIXTRAL,
        DECODE,
        {**WRITE, **EXPERTS, "_linear": 3, "_rmsnorm": 3, "attend_splits": 1},
        13,
    ),
    "deepseek without experts, few rows": (
        replace(DEEPSEEK_V2, experts=None),
        DECODE,
        {"_linear": 4, "_rmsnorm": 2, "_write": 1, "_multiply_heads": 2, "attend_splits": 1},
        10,
    ),
    "gemma, few rows": (GEMMA, DECODE, FEW_ROWS | {"attend_splits": 1}, 8),
    "gemma, many rows": (GEMMA, WIDE_DECODE, MANY_ROWS | {"attend_splits": 1, "_rmsnorm": 2}, 9),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_layer(name):
    config, step, kernels, total = LAUNCHES[name]
    found = of_a_layer(config, step)
    assert found.items() >= kernels.items()
    assert sum(found.values()) == total


def test_launches_before_and_behind_the_layers():
    config = replace(GEMMA, num_layers=1, layer_windows=(None,), logit_softcap=5.0)
    found = launched(config, DECODE)
    found.subtract(of_a_layer(config, DECODE))
    before = {"index_select": 1, "mul_": 1}
    # A first layer has no sum before it, but a norm; the last one leaves a norm and a sum.
    behind = {"add": 1, "_rmsnorm": 2, "_find_damage": 1, "_linear": 1, "_softcap": 1}
    assert +found == Counter(before | behind)


def test_what_allocates_would_be_seen():
    program = fused_program(LLAMA, random_model(LLAMA))
    with Noting() as noting:
        program.run(DECODE)
    assert noting.allocating


def test_a_cache_that_no_kernel_reads_is_refused_at_once():
    with pytest.raises(ConfigError, match="set --kv-cache-dtype"):
        fused_program(LLAMA, random_model(LLAMA), TRITON, kv="int4")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_is_replayed_with_other_tokens():
    model, seqs = random_model(LLAMA), range(3)
    first, second = (
        step_of(*((seq, start, 1) for seq in seqs)).padded(4, 4, "cuda") for start in (0, 1)
    )
    eager, program = (
        fused_program(LLAMA, model, TRITON, torch.bfloat16, "bfloat16", "cuda") for _ in range(2)
    )
    rows = torch.arange(3, dtype=torch.int32, device="cuda")
    expected, out = (torch.zeros(3, LLAMA.vocab_size, device="cuda") for _ in range(2))
    for which in (eager, program):
        which.run(first)  # and kernels are compiled
        which.logits(rows, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program.run(first)
        program.logits(rows, out)
    for static, new in zip(tensors_of(first), tensors_of(second), strict=True):
        static.copy_(new)
    graph.replay()
    eager.run(second)
    eager.logits(rows, expected)
    assert torch.equal(out, expected)


def tensors_of(step):
    (slots,), (tables,) = step.slots, step.tables
    of_seqs = tables.block_tables, tables.query_start, tables.seq_lens
    return step.token_ids, step.positions, slots, *of_seqs
