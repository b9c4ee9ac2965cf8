"""How the sampling kernels of the GPU are told of rows, and which rows are for them.

``runtime/sampler.py`` is the oracle against which they are tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cuda.sampler import RowParams
from octavo.runtime.sampling_row import DraftedRow, SamplingRow, is_greedy


def can_sample(params: SamplingParams) -> bool:
    """Whether the kernels draw as these ask. Masks, biases and penalties change logits before that,
    and do not count; cuts by rank are left to ``runtime/sampler.py``."""
    has_cut = params.top_k > 0 or params.top_p < 1 or params.typical_p < 1
    return is_greedy(params) or not has_cut


def row_params(
    rows: Sequence[SamplingRow | DraftedRow | Request], device: torch.device | str
) -> RowParams:
    """What the kernels need to know of rows for which ``can_sample`` holds."""
    params = [row.params for row in rows]

    def tensor(values: Sequence[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype)).to(device)

    return RowParams(
        tensor([0.0 if is_greedy(p) else p.temperature for p in params], np.float32),
        tensor([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], np.float32),
        tensor([row.seed % 2**64 for row in rows], np.uint64).view(torch.int64),
        tensor([row.sample_index for row in rows], np.uint32).view(torch.int32),
        tensor([row.num_output_tokens for row in rows], np.int64),
    )
