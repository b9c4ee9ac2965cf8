"""A model whose every answer depends on all of the KV it reads: the touchstone of paging.

The "KV" of a position is a number computed from its token and its position; the next token is a
fold over the KV of all positions so far, *read through the block table*. A stale, lost or wrongly
shared block changes the text, and the right text follows from the request alone, so that it can
be computed without an engine (``expected_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.batch import Batch, StepOutput
from octavo.core.executor import FinishedStep

_MASK = 2**61 - 1
_FREED = -1


def _mix(state: int, value: int) -> int:
    """One step of a multiplicative hash. Order matters: reading two blocks swapped shows."""
    return ((state ^ value) * 0x9E3779B97F4A7C15 + 0x165667B19E3779F9) & _MASK


def expected_tokens(prompt_token_ids: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What the hash model answers to a prompt, computed without blocks."""
    state = 0
    tokens = list(prompt_token_ids)
    for position, token_id in enumerate(tokens):
        state = _mix(state, _mix(token_id, position))
    output: list[int] = []
    for position in range(len(tokens), len(tokens) + num_tokens):
        token_id = state % vocab_size
        output.append(token_id)
        state = _mix(state, _mix(token_id, position))
    return output


class HashExecutor:
    """Runs the hash model on an array of slots, one number per token.

    The fold is kept with the KV of each position, so that a step costs no more than its own
    tokens, and yet depends on the whole chain below it. Every ``audit_every``-th item is also
    folded from the start through the block table, which reads every slot.
    """

    depth = 1

    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int = 97, audit_every: int = 1
    ):
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._audit_every = audit_every
        self._num_items = 0
        # slot -> (KV of the position, fold up to and including it)
        self._slots = [(_FREED, _FREED)] * (num_blocks * block_size)

    def kv_capacity(self) -> int:
        return self._num_blocks

    def submit(self, batch: Batch) -> FinishedStep:
        size = self._block_size
        for source, target in batch.block_copies:
            self._slots[target * size : (target + 1) * size] = self._slots[
                source * size : (source + 1) * size
            ]
        tokens: dict[str, list[int]] = {}
        for item in batch.items:
            request, start, end = item.request, item.start, item.start + item.num_tokens
            state = self._forward(request.block_ids, request.token_ids[start:end], start)
            if not item.samples:
                continue
            chosen = [state % self._vocab_size]
            for position in range(end, end + self._num_rounds(batch) - 1):
                state = self._forward(request.block_ids, chosen[-1:], position)
                chosen.append(state % self._vocab_size)
            tokens[request.request_id] = chosen
        return FinishedStep(StepOutput(tokens))

    def close(self) -> None:
        pass

    def _num_rounds(self, batch: Batch) -> int:
        """Of those that are allowed now more, now fewer."""
        return 1 + self._num_items % batch.max_rounds

    def _forward(self, table: Sequence[int], token_ids: Sequence[int], start: int) -> int:
        """Write the KV of tokens from position ``start`` on; the fold after the last of them."""
        size = self._block_size
        state = 0
        if start:
            before = start - 1
            state = self._slots[table[before // size] * size + before % size][1]
        end = start + len(token_ids)
        for position, token_id in enumerate(token_ids, start):
            kv = _mix(token_id, position)
            state = _mix(state, kv)
            self._slots[table[position // size] * size + position % size] = (kv, state)
        self._num_items += 1
        if self._num_items % self._audit_every == 0:
            return self._fold(table, end)
        return state

    def _fold(self, table: Sequence[int], num_tokens: int) -> int:
        """The fold over all KV of a sequence, slot by slot through its block table."""
        size = self._block_size
        state = 0
        for position in range(num_tokens):
            state = _mix(state, self._slots[table[position // size] * size + position % size][0])
        return state
