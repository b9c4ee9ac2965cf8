"""The fused program by plain ops, against the same model op by op: ragged steps, with padding."""

from __future__ import annotations

import pytest
import torch
from fused_models import CONFIGS, EagerTwin, fused_program, random_model, step_of

from octavo.kernels.cuda.plain_ops import PlainOps

# (sequence, tokens that it has, tokens to compute)
STEPS = [
    step_of((0, 0, 23), (1, 0, 1), (2, 0, 40)),  # prompts
    step_of((0, 23, 1), (1, 1, 1), (2, 40, 1)),  # decode
    step_of((2, 41, 5), (3, 0, 33), (0, 24, 1), (1, 2, 20)),  # all at once
    step_of((3, 33, 17), (4, 0, 16)),  # chunks, and the end of a block
    step_of((4, 16, 1)),
]


def rows_of(program, count):
    out = torch.full((count, program.vocab_size), torch.nan)
    program.logits(torch.arange(count, dtype=torch.int32), out)
    return out


def all_logits(program, count):
    """Rows by rows, as many as fit."""
    parts = []
    for start in range(0, count, 32):
        rows = torch.arange(start, min(start + 32, count), dtype=torch.int32)
        parts.append(torch.full((len(rows), program.vocab_size), torch.nan))
        program.logits(rows, parts[-1])
    return torch.cat(parts)


def assert_close(ours, theirs):
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("name", CONFIGS)
def test_it_says_what_the_model_says_op_by_op(name):
    config, model = CONFIGS[name], random_model(CONFIGS[name])
    twin, program = EagerTwin(config, model), fused_program(config, model, PlainOps())
    for step in STEPS:
        count = len(step.token_ids)
        _, expected = twin.run(step)
        program.run(step.padded(64, 6) if count % 2 else step.padded(count, len(step.items)))
        assert_close(all_logits(program, count), expected)
        assert not program.damaged[:count].any()
