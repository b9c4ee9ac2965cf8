"""Tracks which tokens a draft model has computed the KV of, block by block.

The draft model's KV pool has the target's block ids and block tables, so blocks that the target's
scheduler shares, copies, adopts or frees are the same here. But a block need not hold the draft
model's KV of its tokens: its id may have been given to another request since, or only the target
has computed it (a prompt, a prefix hit, a copy). So each block is known by its content: the tokens
that the draft model has computed there, and a hash of those before them.

Two prefixes with the same hash would make the draft model read the KV of another text: its drafts
would be worse, and no answer different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.core.request import Request


class ComputedKV(Protocol):
    """The tokens of requests whose KV a draft model has computed."""

    def num_computed(self, request: Request) -> int:
        """Number of a request's first tokens whose KV this model has computed."""
        ...

    def begin(self, request: Request, start: int, end: int) -> None:
        """Mark the slots of positions ``start`` to ``end`` as about to be overwritten."""
        ...

    def finish(self, request: Request, token_ids: Sequence[int], end: int) -> None:
        """Mark what was begun as computed: ``token_ids`` are those of the positions up to ``end``,
        the request's own, then perhaps draft tokens."""
        ...

    def forget(self, request: Request) -> None:
        """Drop a request whose block table is released."""
        ...

    def abandon(self) -> None:
        """Discard what was begun after a failure: the content of its slots is unknown."""
        ...


class TargetKV:
    """A ``ComputedKV`` of the target's own layers, whose KV the target itself computes."""

    def num_computed(self, request: Request) -> int:
        return request.num_computed_tokens

    def begin(self, request: Request, start: int, end: int) -> None:
        pass

    def finish(self, request: Request, token_ids: Sequence[int], end: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def abandon(self) -> None:
        pass


class _BlockContent(NamedTuple):
    prefix: int  # hash of the tokens of all blocks before it
    token_ids: tuple[int, ...]  # in its first slots


@dataclass(slots=True)
class _TrackedSequence:
    """The computed tokens of a request at its latest look-up."""

    prefixes: list[int]  # a hash for each block whose predecessors are full
    block_ids: list[int]  # blocks with computed tokens
    token_ids: list[int]  # computed tokens, draft tokens included
    num_known: int  # how many of these are known tokens of the request, which cannot change


_EMPTY = _BlockContent(0, ())


class DraftKV:
    """A ``ComputedKV`` of a KV pool of the draft model's own.

    A request whose block table has only grown costs as much as it has new tokens; a new or resumed
    one is looked up block by block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self._block_size = block_size
        self._contents = [_EMPTY] * num_blocks
        self._sequences: dict[str, _TrackedSequence] = {}

    def num_computed(self, request: Request) -> int:
        sequence = self._sequences.get(request.request_id)
        if sequence is not None:
            self._drop_rejected_tokens(sequence, request.token_ids)
            num_blocks = -(-len(sequence.token_ids) // self._block_size)
            del sequence.block_ids[num_blocks:]
            if request.block_ids[:num_blocks] != sequence.block_ids:
                sequence = None  # a block was copied, or adopted
        if sequence is None:
            sequence = self._sequences[request.request_id] = self._look_up(request)
        return len(sequence.token_ids)

    def begin(self, request: Request, start: int, end: int) -> None:
        size = self._block_size
        self._truncate(self._sequences[request.request_id], start)
        for index in range(start // size, -(-end // size)):
            block_id = request.block_ids[index]
            prefix, token_ids = self._contents[block_id]
            kept = token_ids[: start % size] if index == start // size else ()
            self._contents[block_id] = _BlockContent(prefix, kept)

    def finish(self, request: Request, token_ids: Sequence[int], end: int) -> None:
        size = self._block_size
        sequence = self._sequences[request.request_id]
        start = len(sequence.token_ids)
        sequence.token_ids += token_ids[start:end]
        sequence.num_known = min(end, len(request.token_ids))
        for index in range(start // size, -(-end // size)):
            content = tuple(token_ids[index * size : min(end, (index + 1) * size)])
            prefix, block_id = sequence.prefixes[index], request.block_ids[index]
            self._contents[block_id] = _BlockContent(prefix, content)
            if index == len(sequence.block_ids):
                sequence.block_ids.append(block_id)
            if len(content) == size:
                sequence.prefixes.append(hash((prefix, content)))

    def forget(self, request: Request) -> None:
        self._sequences.pop(request.request_id, None)

    def abandon(self) -> None:
        self._sequences.clear()  # so that all requests are looked up by their blocks again

    def _drop_rejected_tokens(self, sequence: _TrackedSequence, token_ids: Sequence[int]) -> None:
        computed = sequence.token_ids
        right = sequence.num_known
        while right < min(len(computed), len(token_ids)) and computed[right] == token_ids[right]:
            right += 1
        self._truncate(sequence, right)
        sequence.num_known = right

    def _truncate(self, sequence: _TrackedSequence, num_tokens: int) -> None:
        del sequence.token_ids[num_tokens:]
        del sequence.prefixes[num_tokens // self._block_size + 1 :]
        del sequence.block_ids[-(-num_tokens // self._block_size) :]

    def _look_up(self, request: Request) -> _TrackedSequence:
        """Find the tokens of a request that its blocks hold, up to the first missing one."""
        size = self._block_size
        # The salt keeps tenants apart, so that no tenant's speed tells what another has asked.
        sequence = _TrackedSequence([hash(request.cache_salt)], [], [], 0)
        for index, block_id in enumerate(request.block_ids):
            prefix, computed = self._contents[block_id]
            own = request.token_ids[index * size : (index + 1) * size]
            if prefix != sequence.prefixes[-1]:
                break
            same = _common_prefix(computed, own)
            if same == 0:
                break
            sequence.token_ids += own[:same]
            sequence.block_ids.append(block_id)
            if same < size:
                break
            sequence.prefixes.append(hash((prefix, computed)))
        sequence.num_known = len(sequence.token_ids)
        return sequence


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
