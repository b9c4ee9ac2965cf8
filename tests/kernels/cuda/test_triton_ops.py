"""A whole step by Triton's kernels: against plain torch, and what it launches and allocates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("triton")

import torch
from fused_models import GEMMA, LLAMA, MAX_LEN, fused_program, random_model, step_of
from torch.utils._python_dispatch import TorchDispatchMode
from triton_tools import launches

from octavo.kernels.cuda.attention_plan import AttentionLimits, Gpu
from octavo.kernels.cuda.triton_ops import create_triton_ops

LIMITS = AttentionLimits(max_num_seqs=32, max_query=4, max_seq_len=MAX_LEN)
TRITON = partial(create_triton_ops, attention=LIMITS, gpu=Gpu(90, 8))
CONFIGS = {
    "llama": replace(LLAMA, num_layers=1, layer_windows=(None,), attention_bias=True),
    "gemma": replace(GEMMA, num_layers=2, layer_windows=(9, None), logit_softcap=5.0),
}
# More rows than a product of few rows takes; then fewer, a token each.
STEPS = [step_of((0, 0, 14), (1, 0, 1), (2, 0, 5)), step_of((0, 14, 1), (1, 1, 1), (2, 5, 1))]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_as_plain_torch(name, device):
    config, model = CONFIGS[name], random_model(CONFIGS[name])
    plain = fused_program(config, model)
    program = fused_program(config, model, TRITON, device=device)
    for step, shape in zip(STEPS, [(24, 4), (4, 4)], strict=True):
        rows = torch.tensor([0, *step.query_start[1:] - 1], dtype=torch.int32)
        found = []
        for which, where in ((plain, "cpu"), (program, device)):
            which.run(step.padded(*shape, device=where))
            found.append(torch.full((len(rows), which.vocab_size), torch.nan, device=where))
            which.logits(rows.to(where), found[-1])
            assert not which.damaged[: step.query_start[-1]].any()
        expected, got = found[0], found[1].cpu()
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
