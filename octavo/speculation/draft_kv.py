"""Which slots of a draft model's KV pool hold what.

The pool has the blocks of the target's, under the same ids, so that whoever shares, copies, adopts
or frees a block there does the same here without knowing. What must be known is whether the slots
of a block hold the draft's own keys and values: its id may have been given to somebody else since,
or only the target has computed it (a prompt, a prefix hit, a copy). So the truth is kept by
content: of each block, which tokens the draft has computed there, and which came before them.

What came before is a hash. Two prefixes with the same one would make the draft read keys and values
of another text: its guesses would be worse, and no answer different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.core.request import Request


class KnownKV(Protocol):
    """What a drafting model has computed of requests."""

    def num_computed(self, request: Request) -> int:
        """How many of a request's first tokens have keys and values of this model."""
        ...

    def begin(self, request: Request, start: int, end: int) -> None:
        """The slots of positions ``start`` to ``end`` are about to be written, or spoiled."""
        ...

    def finish(self, request: Request, token_ids: Sequence[int], end: int) -> None:
        """What was begun is computed: ``token_ids`` stand at the positions up to ``end``. They are
        the request's own, and perhaps guesses after them."""
        ...

    def forget(self, request: Request) -> None:
        """Its block table is no longer what it was."""
        ...

    def abandon(self) -> None:
        """What was begun failed: nobody knows what is in its slots, which others may share."""
        ...


class TargetKV:
    """Of a model whose keys and values are the target's own: the target computes them."""

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


class _Content(NamedTuple):
    prefix: int  # hash of the tokens of all blocks before it
    token_ids: tuple[int, ...]  # in its first slots


@dataclass(slots=True)
class _Sequence:
    """A request as it was when it was looked at last."""

    prefixes: list[int]  # of its blocks, as far as those before them are full
    block_ids: list[int]  # those with computed tokens
    token_ids: list[int]  # that are computed: guesses too
    num_known: int  # of these, tokens of the request, which do not change any more


_NOTHING = _Content(0, ())


class DraftKV:
    """The truth of a pool of its own.

    A request whose table has only grown costs as much as it has new tokens; whoever comes anew, or
    again, is looked up block by block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self._block_size = block_size
        self._contents = [_NOTHING] * num_blocks
        self._sequences: dict[str, _Sequence] = {}

    def num_computed(self, request: Request) -> int:
        sequence = self._sequences.get(request.request_id)
        if sequence is not None:
            self._drop_wrong_guesses(sequence, request.token_ids)
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
            self._contents[block_id] = _Content(prefix, kept)

    def finish(self, request: Request, token_ids: Sequence[int], end: int) -> None:
        size = self._block_size
        sequence = self._sequences[request.request_id]
        start = len(sequence.token_ids)
        sequence.token_ids += token_ids[start:end]
        sequence.num_known = min(end, len(request.token_ids))
        for index in range(start // size, -(-end // size)):
            content = tuple(token_ids[index * size : min(end, (index + 1) * size)])
            prefix, block_id = sequence.prefixes[index], request.block_ids[index]
            self._contents[block_id] = _Content(prefix, content)
            if index == len(sequence.block_ids):
                sequence.block_ids.append(block_id)
            if len(content) == size:
                sequence.prefixes.append(hash((prefix, content)))

    def forget(self, request: Request) -> None:
        self._sequences.pop(request.request_id, None)

    def abandon(self) -> None:
        self._sequences.clear()  # so that all are looked up by what is known of the blocks

    def _drop_wrong_guesses(self, sequence: _Sequence, token_ids: Sequence[int]) -> None:
        computed = sequence.token_ids
        right = sequence.num_known
        while right < min(len(computed), len(token_ids)) and computed[right] == token_ids[right]:
            right += 1
        self._truncate(sequence, right)
        sequence.num_known = right

    def _truncate(self, sequence: _Sequence, num_tokens: int) -> None:
        del sequence.token_ids[num_tokens:]
        del sequence.prefixes[num_tokens // self._block_size + 1 :]
        del sequence.block_ids[-(-num_tokens // self._block_size) :]

    def _look_up(self, request: Request) -> _Sequence:
        """What the blocks of a request hold of its tokens, up to the first that is missing."""
        size = self._block_size
        # Tenants do not learn from a block what others have asked before them.
        sequence = _Sequence([hash(request.cache_salt)], [], [], 0)
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
    """How many first entries are the same."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
