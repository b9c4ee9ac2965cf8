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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.core.batch import BAD_LOGITS, NO_TOKEN_LEFT, OVERFLOW
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError, MissingPackageError
from octavo.extras import NO_TORCH, need_torch
from octavo.kernels.cpu import abi
from octavo.runtime.sampling_row import GREEDY_TEMPERATURE, SamplingRow

# The fields of abi.Sample, in their order. One pack_into is ten times as fast as 18 assignments.
_STRUCT = struct.Struct("@4f2d3iI2P2Q3Pq")
assert _STRUCT.size == ctypes.sizeof(abi.Sample)

_REASONS = {
    abi.OCT_TOKEN_BAD_LOGITS: BAD_LOGITS,
    abi.OCT_TOKEN_OVERFLOW: OVERFLOW,
    abi.OCT_TOKEN_NO_CHOICE: NO_TOKEN_LEFT,
}
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
_MASK = 2**64 - 1


class _Biases(NamedTuple):
    of: Mapping[int, float]
    ids: array[int]
    amounts: array[float]


# A request will do: to make a row of it copies its output.
Row = SamplingRow | Request


def is_native(row: Row) -> bool:
    """Whether the native sampler gives this row all that it asks for."""
    return row.params.logprobs is None and row.params.typical_p >= 1.0


def check_params(params: SamplingParams) -> None:
    """InvalidRequestError if a request wants what only Python does, and that has no PyTorch."""
    for field, is_wanted in (
        ("logprobs", params.logprobs is not None),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("typical_p", params.typical_p < 1.0),
    ):
        if is_wanted:
            try:
                need_torch(field)
            except MissingPackageError:
                raise InvalidRequestError(NO_TORCH, field) from None


def status_error(status: int) -> str:
    """What is wrong with a row of this ``OCT_TOKEN_*``: the words of ``runtime/sampler.py``."""
    return _REASONS[status]


class SampleArray:
    """A persistent C array of ``oct_sample``: ``array``, or its ``address``."""

    def __init__(self, capacity: int):
        self.array = (abi.Sample * capacity)()
        self.address = ctypes.addressof(self.array)
        # What the structs point to, alive until the next write. Prompts and biases do not change,
        # so that their arrays are kept from step to step, found by the identity of what they were
        # made of.
        self._prompts: dict[int, tuple[Sequence[int], array[int]]] = {}
        self._biases: dict[int, _Biases] = {}
        self._of_this_step: list[array[int]] = []

    def write(self, rows: Sequence[Row]) -> None:
        """Describe ``rows`` in the first entries. What only Python can do is left out of them."""
        structs, pack, size = self.array, _STRUCT.pack_into, _STRUCT.size
        prompts, biases = self._prompts, self._biases
        self._prompts, self._biases, self._of_this_step = {}, {}, []
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
                output, num_output = self._alive(array("i", row.output_token_ids))
            bias_ids = amounts = num_biases = mask = 0
            if params.logit_bias:
                bias_ids, amounts, num_biases = self._bias(params.logit_bias, biases)
            bits = row.bitmask()
            if bits is not None:
                mask, _ = self._alive(bits)
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
                mask,
                bias_ids,
                amounts,
                num_biases,
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

    def _bias(self, bias: Mapping[int, float], known: dict[int, _Biases]) -> tuple[int, int, int]:
        """Addresses of the ids and of the amounts, and how many they are."""
        key = id(bias)
        entry = self._biases.get(key) or known.get(key)
        if entry is None:
            entry = _Biases(bias, array("i", bias), array("f", bias.values()))
        self._biases[key] = entry
        (ids, count), (amounts, _) = entry.ids.buffer_info(), entry.amounts.buffer_info()
        return ids, amounts, count

    def _alive(self, values: array[int]) -> tuple[int, int]:
        """Address and length of an array of this step, which lives as long as it."""
        self._of_this_step.append(values)
        return values.buffer_info()
