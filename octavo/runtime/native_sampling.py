"""Arrays of ``oct_sample`` and ``oct_logprobs`` (csrc/octavo.h), which the native sampler uses.

It samples a row right after its logits, inside the one call of a step, and computes the
log-probabilities there. ``runtime/sampler.py`` is the reference that it is tested against.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from octavo.core.batch import BAD_LOGITS, NO_TOKEN_LEFT, OVERFLOW, TokenLogprobs
from octavo.core.request import Request
from octavo.core.token_mask import Bits
from octavo.kernels.cpu import abi
from octavo.runtime.mask_thread import LateMask
from octavo.runtime.sampling_row import DraftedRow, SamplingRow, is_greedy

# The fields of abi.Sample, in their order. One pack_into is ten times as fast as 20 assignments.
_SAMPLE = struct.Struct("@4f3d3iI2P2QPq2Pq")
assert _SAMPLE.size == ctypes.sizeof(abi.Sample)
_MASK_OFFSET = abi.Sample.mask.offset
_ADDRESS = struct.Struct("@P")
_LOGPROBS = struct.Struct("@2id2P")
assert _LOGPROBS.size == ctypes.sizeof(abi.Logprobs)

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


# Requests are rows as they are: a ``SamplingRow`` of one would copy its output.
Row = SamplingRow | DraftedRow | Request


def status_error(status: int) -> str:
    """Return the error of a row by its ``OCT_TOKEN_*``, in the words of ``runtime/sampler.py``."""
    return _REASONS[status]


class SampleArray:
    """A persistent C array of ``oct_sample``."""

    def __init__(self, capacity: int):
        self.array = (abi.Sample * capacity)()
        self.address = ctypes.addressof(self.array)
        # Memory that the structs point to, kept alive until the next write. Prompts and biases do
        # not change, so their arrays are kept from step to step, by the id() of their origin.
        self._prompts: dict[int, tuple[Sequence[int], array[int]]] = {}
        self._biases: dict[int, _Biases] = {}
        # The outputs of requests grow: only their new tokens are copied.
        self._outputs: dict[int, tuple[Request, array[int]]] = {}
        self._of_this_step: list[array[int]] = []

    def write(self, rows: Sequence[Row], late: list[LateMask] | None = None) -> None:
        """Write ``rows`` to the first entries.

        Args:
            late: masks that are no look-ups are added to it, for a `MaskThread` to make. None makes
                them here.
        """
        structs, pack, size = self.array, _SAMPLE.pack_into, _SAMPLE.size
        prompts, biases, outputs = self._prompts, self._biases, self._outputs
        self._prompts, self._biases, self._outputs, self._of_this_step = {}, {}, {}, []
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
                output, num_output = self._output(row, outputs)
            bias_ids = amounts = num_biases = mask = mask_turn = 0
            if params.logit_bias:
                bias_ids, amounts, num_biases = self._bias(params.logit_bias, biases)
            if late is not None and row.mask_seconds:
                give = partial(self._give_mask, offset + _MASK_OFFSET)
                late.append(LateMask(offset // size, row, give))
                mask_turn = len(late)
            elif (bits := row.bitmask()) is not None:
                mask, _ = self._alive(bits)
            pack(
                structs,
                offset,
                0.0 if is_greedy(params) else params.temperature,
                repetition,
                params.frequency_penalty,
                params.presence_penalty,
                params.top_p,
                params.min_p,
                params.typical_p,
                params.top_k,
                num_prompt,
                num_output,
                row.sample_index,
                prompt,
                output,
                row.seed & _MASK,
                row.num_output_tokens,
                mask,
                mask_turn,
                bias_ids,
                amounts,
                num_biases,
            )
            offset += size

    def _give_mask(self, offset: int, bits: Bits | None) -> None:
        """Write the mask of a row, at the ``offset`` of its field: by another thread."""
        if bits is not None:
            _ADDRESS.pack_into(self.array, offset, self._alive(bits)[0])

    def _prompt(
        self, token_ids: Sequence[int], known: dict[int, tuple[Sequence[int], array[int]]]
    ) -> tuple[int, int]:
        """Return address and length of a prompt."""
        key = id(token_ids)
        entry = self._prompts.get(key) or known.get(key)
        if entry is None:
            entry = (token_ids, array("i", token_ids))
        self._prompts[key] = entry
        return entry[1].buffer_info()

    def _output(self, row: Row, known: dict[int, tuple[Request, array[int]]]) -> tuple[int, int]:
        """Return address and length of the output of a row."""
        if not isinstance(row, Request):
            return self._alive(array("i", row.output_since(0)))
        entry = self._outputs.get(id(row)) or known.get(id(row))
        if entry is None or len(entry[1]) > row.num_output_tokens:
            entry = (row, array("i"))
        self._outputs[id(row)] = entry
        entry[1].extend(row.output_since(len(entry[1])))
        return entry[1].buffer_info()

    def _bias(self, bias: Mapping[int, float], known: dict[int, _Biases]) -> tuple[int, int, int]:
        """Return the addresses of ids and amounts, and their number."""
        key = id(bias)
        entry = self._biases.get(key) or known.get(key)
        if entry is None:
            entry = _Biases(bias, array("i", bias), array("f", bias.values()))
        self._biases[key] = entry
        (ids, count), (amounts, _) = entry.ids.buffer_info(), entry.amounts.buffer_info()
        return ids, amounts, count

    def _alive(self, values: array[int]) -> tuple[int, int]:
        """Return address and length of an array, and keep it alive for this step."""
        self._of_this_step.append(values)
        return values.buffer_info()


class LogprobArray:
    """A C array of ``oct_logprobs``, which is reused from step to step."""

    def __init__(self, capacity: int, vocab_size: int):
        self._structs = (abi.Logprobs * capacity)()
        self._address = ctypes.addressof(self._structs)
        self._vocab_size = vocab_size
        # The top tokens of all rows in one array, and where those of each row end.
        self._top_ids: array[int] = array("i")
        self._top: array[float] = array("d")
        self._ends: list[int] = [0]

    def ask(self, counts: Sequence[int | None]) -> int:
        """Return the address of structs that ask for the top ``count`` tokens of each row, for
        nothing where it is None; NULL if all are None."""
        if all(count is None for count in counts):
            return 0
        asked = [-1 if count is None else min(count, self._vocab_size) for count in counts]
        self._ends = [0, *accumulate(max(count, 0) for count in asked)]
        self._top_ids = array("i", bytes(4 * self._ends[-1]))
        self._top = array("d", bytes(8 * self._ends[-1]))
        top_ids, top = self._top_ids.buffer_info()[0], self._top.buffer_info()[0]
        for row, (count, begin) in enumerate(zip(asked, self._ends, strict=False)):
            _LOGPROBS.pack_into(
                self._structs, row * _LOGPROBS.size, count, 0, 0.0, top_ids + 4 * begin,
                top + 8 * begin,
            )  # fmt: skip
        return self._address

    def entry(self, row: int, token_id: int) -> TokenLogprobs:
        """Return the log-probabilities of a row that asked for them."""
        _, rank, logprob, _, _ = _LOGPROBS.unpack_from(self._structs, row * _LOGPROBS.size)
        mine = slice(self._ends[row], self._ends[row + 1])
        top = tuple(zip(self._top_ids[mine], self._top[mine], strict=True))
        return TokenLogprobs(token_id, logprob, rank, top)
