"""A sampler of devices, asked as ``runtime/sampler.py`` is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.kernels.cuda.sampling import (
    RECORD_WORDS,
    Asked,
    DeviceSampler,
    SampledTokens,
    SamplingTensors,
)
from octavo.runtime.cuda_sampling import REASONS, LogprobRows, Row, SamplingArrays
from octavo.runtime.sampler import SamplerOutput
from octavo.runtime.streams import HostStream

# Rows that only fill up, and what is in them: nobody is to read it, nor to choke on it.
PADDING, NOISE = 2, 0x5A5A5A5A


def upload(arrays: SamplingArrays, device: str, num_rows: int) -> SamplingTensors:
    """Tensors of what an arrays object holds, every row at the slot of its index."""

    def tensor(array: torch.Tensor | None) -> torch.Tensor | None:
        return None if array is None else array.to(device)

    slots = torch.arange(len(arrays.records), dtype=torch.int32, device=device)
    slots[num_rows:] = -1
    last_tokens = torch.full((len(slots) + 1,), -7, dtype=torch.int32, device=device)
    records = tensor(arrays.records)
    assert records is not None
    return SamplingTensors(
        records,
        slots,
        last_tokens,
        tensor(arrays.masks),
        tensor(arrays.edit_starts),
        tensor(arrays.edits),
    )


def described(
    rows: Sequence[Row], vocab_size: int, arrays: SamplingArrays | None = None
) -> tuple[SamplingArrays, Asked]:
    if arrays is None:
        shape = len(rows) + PADDING, RECORD_WORDS
        records = torch.full(shape, NOISE, dtype=torch.int32)
        arrays = SamplingArrays(records, vocab_size, HostStream().host_buffer)
    return arrays, arrays.write(rows, [row.num_output_tokens for row in rows])


def sample_on_device(
    sampler: DeviceSampler,
    logits: torch.Tensor,
    rows: Sequence[Row],
    arrays: SamplingArrays | None = None,
) -> SamplerOutput:
    """What a sampler makes of logits [R, V], which are to be the same afterwards."""
    device, before = str(logits.device), logits.clone()
    arrays, asked = described(rows, logits.shape[1], arrays)
    tensors = upload(arrays, device, len(rows))
    out = SampledTokens.allocate(len(arrays.records), device)
    sampler.sample(logits, tensors, asked, out)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    assert torch.equal(tensors.last_tokens[: len(rows)], out.token_ids[: len(rows)])
    return _output(rows, out, logits.shape[1])


def _output(rows: Sequence[Row], out: SampledTokens, vocab_size: int) -> SamplerOutput:
    token_ids, status = (part[: len(rows)].tolist() for part in out.answers.cpu())
    logprob_rows = LogprobRows(out.logprobs.cpu().numpy(), vocab_size)
    errors = {index: REASONS[code] for index, code in enumerate(status) if code}
    logprobs = [
        None
        if row.params.logprobs is None or index in errors
        else logprob_rows.entry(index, token_ids[index], row.params.logprobs)
        for index, row in enumerate(rows)
    ]
    return SamplerOutput(token_ids, logprobs, errors)
