"""Sampling rows as the native sampler reads them (``oct_sample`` of csrc/octavo.h).

The native sampler chooses the token of a row right after its logits, inside the one call of a step.
It covers what most requests ask for; ``is_native`` says of which rows. The others get their logits
back and go through ``runtime/sampler.py``, against which the native sampler is tested.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Sequence

from octavo.core.batch import BAD_LOGITS
from octavo.core.request import Request
from octavo.kernels.cpu import abi
from octavo.runtime.sampler import GREEDY_TEMPERATURE, OVERFLOW, SamplingRow

# The fields of abi.Sample, in their order. One pack_into is ten times as fast as 14 assignments.
_STRUCT = struct.Struct("@4f2d3iI2P2Q")
assert _STRUCT.size == ctypes.sizeof(abi.Sample)

_REASONS = {abi.OCT_TOKEN_BAD_LOGITS: BAD_LOGITS, abi.OCT_TOKEN_OVERFLOW: OVERFLOW}
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
_MASK = 2**64 - 1

# A request will do: to make a row of it copies its output.
Row = SamplingRow | Request


def is_native(row: Row) -> bool:
    """Whether the native sampler gives this row all that it asks for."""
    params = row.params
    return (
        params.logprobs is None
        and params.typical_p >= 1.0
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not row.bad_words_token_ids
        and (params.min_tokens == 0 or row.num_output_tokens >= params.min_tokens)
    )


def status_error(status: int) -> str:
    """What is wrong with a row of this ``OCT_TOKEN_*``: the words of ``runtime/sampler.py``."""
    return _REASONS[status]


class SampleArray:
    """A persistent C array of ``oct_sample``: ``array``, or its ``address``."""

    def __init__(self, capacity: int):
        self.array = (abi.Sample * capacity)()
        self.address = ctypes.addressof(self.array)
        # What the structs point to, alive until the next write. A prompt does not change, so that
        # its array is kept from step to step, found by the identity of the sequence it was made of.
        self._prompts: dict[int, tuple[Sequence[int], array[int]]] = {}
        self._outputs: list[array[int]] = []

    def write(self, rows: Sequence[Row]) -> None:
        """Describe ``rows`` in the first entries. What only Python can do is left out of them."""
        structs, pack, size = self.array, _STRUCT.pack_into, _STRUCT.size
        prompts = self._prompts
        self._prompts, self._outputs = {}, []
        offset = 0
        for row in rows:
            params = row.params
            num_prompt = num_output = prompt = output = 0
            repetition = params.repetition_penalty
            if params.has_penalties:
                if repetition != 1.0:
                    # Beyond float32 is infinite, as in a conversion by torch.
                    repetition = repetition if repetition <= _LARGEST_FLOAT else math.inf
                    prompt, num_prompt = self._prompt(row.prompt_token_ids, prompts)
                output, num_output = self._output(row.output_token_ids)
            pack(
                structs,
                offset,
                0.0 if params.temperature < GREEDY_TEMPERATURE else params.temperature,
                repetition,
                params.frequency_penalty,
                params.presence_penalty,
                params.top_p,
                params.min_p,
                params.top_k,
                num_prompt,
                num_output,
                row.sample_index,
                prompt,
                output,
                row.seed & _MASK,
                row.num_output_tokens,
            )
            offset += size

    def _prompt(
        self, token_ids: Sequence[int], known: dict[int, tuple[Sequence[int], array[int]]]
    ) -> tuple[int, int]:
        """Address and length of a prompt."""
        key = id(token_ids)
        entry = self._prompts.get(key) or known.get(key)
        if entry is None:
            entry = (token_ids, array("i", token_ids))
        self._prompts[key] = entry
        return entry[1].buffer_info()

    def _output(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Address and length of what a request has generated."""
        copy = array("i", token_ids)
        self._outputs.append(copy)
        return copy.buffer_info()
