"""A model of arithmetic in the place of a fused program: what it answers depends on every token and
on its place, as read through block tables, so that whatever is put in the wrong place shows.

The logits of a row are one of some hundred rows of noise, by what the tokens fold to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.cuda.ops import StepTensors
from octavo.runtime.kv_cache import KVCache

_PRIME = 65521
_NOISE = torch.randn(509, 128, generator=torch.Generator().manual_seed(1)) * 3


class FoldProgram:
    """A ``StepProgram`` over the first layer of a cache of float32.

    Args:
        damaged_token: its rows are said to be no numbers.
    """

    vocab_size = _NOISE.shape[1]
    ops_per_token = 1.0

    def __init__(self, kv_cache: KVCache, max_tokens: int, damaged_token: int = -1):
        self.num_resets = 0
        self.damaged = torch.zeros(max_tokens, dtype=torch.int32)
        self._folds = torch.zeros(max_tokens, dtype=torch.int64)
        self._slots = kv_cache.layer(0)[0].parts[0][..., 0, 0]  # [blocks, block_size], a view
        self._damaged_token = damaged_token

    def run(self, step: StepTensors) -> None:
        size = self._slots.shape[1]
        self.damaged[: step.num_tokens] = step.token_ids == self._damaged_token
        tokens, positions, slots = (
            each.tolist() for each in (step.token_ids, step.positions, step.slots[0])
        )
        for token_id, position, slot in zip(tokens, positions, slots, strict=True):
            if slot >= 0:
                self._slots[slot // size, slot % size] = _kv(token_id, position)
        tables = step.tables[0]
        starts = tables.query_start.tolist()
        for index, length in enumerate(tables.seq_lens.tolist()):
            table = tables.block_tables[index, : -(-length // size)].long()
            values = self._slots[table].reshape(-1)[:length].long().tolist()
            rows = range(starts[index], starts[index + 1])
            for row in rows if length else ():
                self._folds[row] = fold(values[: length - (rows.stop - 1 - row)])

    def reset(self) -> None:
        self.num_resets += 1

    def logits(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(logits_of(self._folds[rows.long()]))


def _kv(token_id: int, position: int) -> int:
    return (token_id * 1009 + position * 13 + 7) % 8191  # exact in float32


def fold(values: Sequence[int]) -> int:
    state = 1
    for value in values:
        state = (state * 31 + value) % _PRIME
    return state


def logits_of(folds: Tensor) -> Tensor:
    return _NOISE[folds % len(_NOISE)]


def logits_after(token_ids: Sequence[int]) -> Tensor:
    """Float32 [1, V]: what a model says that has read these tokens."""
    state = fold([_kv(token_id, position) for position, token_id in enumerate(token_ids)])
    return logits_of(torch.tensor([state]))
