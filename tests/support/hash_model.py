"""A model of hashes, whose every answer depends on all KV that it reads: a test of paging.

The "KV" of a position is a number computed from its token and its position; the next token is a
fold over the KV of all positions so far, *read through the block table*. A stale, lost or wrongly
shared block changes the text, and the right text follows from the request alone, so that it can
be computed without an engine (``expected_tokens``).

With sliding windows there is a fold over the KV that each group of layers attends to, and all folds
together are the *state* that determines the next token. KV in a window also depends on the state
before it, as a layer's KV depends on all layers below. Reading a slot that has left its window is
an error. A window has two positions at least: a step goes on from the state of the one before it.

A request with a ``SinkWindow`` attends to its sinks and window in all groups; until that excludes
a position, its KV is that of other requests.
With recurrent layers (``core/state_slots.py``) there is one more number, which each token changes:
it is *carried* from step to step in a state slot, and KV and answers depend on it. A slot that is
stale, or another request's, changes the text, too.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import NamedTuple, TypeAlias

from octavo.core.batch import Batch, Draft, ScheduledRequest, StepOutput
from octavo.core.drafting import DraftingRequest
from octavo.core.executor import NoModel, StepHandle
from octavo.core.kv_tables import ONE_TABLE, Windows
from octavo.core.request import Request
from octavo.core.sink_window import SinkWindow
from octavo.core.state_types import NO_STATE, StateStep

# Drafts the tokens that follow a prompt from a position on.
Propose = Callable[[Sequence[int], int], Draft | None]

_MASK = 2**61 - 1
_FREED = -1


def _mix(state: int, value: int) -> int:
    """Compute one step of a multiplicative hash, in which order matters."""
    return ((state ^ value) * 0x9E3779B97F4A7C15 + 0x165667B19E3779F9) & _MASK


class _Slot(NamedTuple):
    """The KV of a position in a layer group."""

    kv: int
    fold: int  # over all KV up to this position's, in a group without a window
    state: int  # of all groups


_Slots: TypeAlias = tuple[_Slot, ...]  # of one position, a slot of each group
_Read: TypeAlias = Callable[[int, int], int]  # the KV that a group has of a position


def _seen_before(
    window: int | None, sink_window: SinkWindow | None, position: int
) -> list[int] | None:
    """Return the earlier positions that a query attends to in a group; None for all."""
    if sink_window is not None and position >= sink_window.num_tokens:
        return [*range(sink_window.sinks), *range(sink_window.first_seen(position), position)]
    return None if window is None else [*range(max(0, position - window + 1), position)]


def _carry(carried: int | None, token_id: int, position: int) -> int | None:
    """Return the carried number after a token; None for a model without recurrent layers."""
    return None if carried is None else _mix(carried, _mix(token_id, position))


def _next(
    windows: Windows,
    token_id: int,
    position: int,
    before: _Slots,
    read: _Read,
    carried: int | None = None,
    sink_window: SinkWindow | None = None,
) -> _Slots:
    """Return the slots of a position from those ``before`` it and the number ``carried`` after."""
    kvs: list[int] = []
    folds: list[int] = []
    for group, window in enumerate(windows):
        kv = _mix(token_id, position)
        if group:
            kv = _mix(kv, group)
        if carried is not None:
            kv = _mix(kv, carried)
        seen = _seen_before(window, sink_window, position)
        if seen is None:
            fold = before[group].fold
        else:
            kv = _mix(kv, before[group].state)
            fold = reduce(_mix, [read(group, other) for other in seen], 0)
        kvs.append(kv)
        folds.append(_mix(fold, kv))
    state = _state(folds, carried)
    return tuple(_Slot(kv, fold, state) for kv, fold in zip(kvs, folds, strict=True))


def _state(folds: Sequence[int], carried: int | None) -> int:
    """Return the state that determines the next token."""
    state = reduce(_mix, folds)
    return state if carried is None else _mix(state, carried)


def _first(windows: Windows) -> _Slots:
    """Return the slots before the first position."""
    return (_Slot(0, 0, 0),) * len(windows)


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    windows: Windows = ONE_TABLE,
    sink_window: SinkWindow | None = None,
    *,
    has_states: bool = False,
) -> list[int]:
    """Return the hash model's answer to a prompt, computed without blocks."""
    tokens = list(prompt_token_ids)
    slots: list[_Slots] = []
    last = _first(windows)
    carried = 0 if has_states else None
    for position in range(len(prompt_token_ids) + num_tokens):
        if position >= len(prompt_token_ids):
            tokens.append(last[0].state % vocab_size)
        read = partial(_read_list, slots)
        carried = _carry(carried, tokens[position], position)
        last = _next(windows, tokens[position], position, last, read, carried, sink_window)
        slots.append(last)
    return tokens[len(prompt_token_ids) :]


def _read_list(slots: Sequence[_Slots], group: int, position: int) -> int:
    return slots[position][group].kv


class HashDrafts:
    """Drafts for the hash model: chains and trees, with right tokens and wrong ones."""

    def __init__(
        self,
        rng: random.Random,
        max_tokens: int = 6,
        vocab_size: int = 97,
        windows: Windows = ONE_TABLE,
    ):
        self._rng = rng
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._windows = windows

    def __call__(self, prompt_token_ids: Sequence[int], position: int) -> Draft | None:
        rng = self._rng
        count = rng.randint(0, self._max_tokens)
        num_output = position - len(prompt_token_ids)
        truth = expected_tokens(
            prompt_token_ids, num_output + count, self._vocab_size, self._windows
        )[num_output:]
        is_chain = rng.random() < 0.5
        token_ids: list[int] = []
        parents: list[int] = []
        right = {-1: 0}  # the nodes of the right path, and how far they are down it
        for index in range(count):
            parent = index - 1 if is_chain else rng.randint(-1, index - 1)
            siblings = {token_ids[i] for i in range(index) if parents[i] == parent}
            token_id = rng.randrange(self._vocab_size)
            if parent in right and rng.random() < 0.8:
                token_id = truth[right[parent]]
            if token_id in siblings:
                break
            if parent in right and token_id == truth[right[parent]]:
                right[index] = right[parent] + 1
            token_ids.append(token_id)
            parents.append(parent)
        return Draft(tuple(token_ids), tuple(parents)) if token_ids else None


class FunctionProposer:
    """A ``DraftProposer`` that calls a function.

    Args:
        passes: it does not draft for a request whose number of tokens is a multiple of this, so
            that the request may run ahead. 0: it always drafts.
    """

    max_tokens = 16
    seconds = 0.0

    def __init__(self, propose: Propose, passes: int = 0):
        self._propose = propose
        self._passes = passes
        self.known: set[str] = set()  # ids of requests it drafted for that have not ended

    def wants(self, request: Request) -> bool:
        return not self._passes or len(request.token_ids) % self._passes != 0

    def propose(self, openings: Sequence[DraftingRequest], batch_tokens: int) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for request, _ in openings:
            self.known.add(request.request_id)
            draft = self._propose(request.prompt_token_ids, len(request.token_ids))
            if draft is not None:
                drafts[request.request_id] = draft
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        assert request.request_id in self.known or request.is_finished

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        self.known.discard(request.request_id)


_Tables: TypeAlias = Sequence[list[int]]  # of each group


@dataclass(frozen=True, slots=True)
class _Work:
    """An item of a batch, as it was when it was submitted."""

    request_id: str
    tables: _Tables
    token_ids: list[int]  # from ``start`` on, without those that are still awaited
    start: int
    end: int
    num_sampled: int
    draft: Draft | None
    sink_window: SinkWindow | None
    states: StateStep | None

    @classmethod
    def of(cls, item: ScheduledRequest) -> _Work:
        request = item.request
        return cls(
            request.request_id,
            [table.copy() for table in request.block_tables],
            request.token_ids[item.start : item.end],
            item.start,
            item.end,
            item.num_sampled,
            item.draft,
            request.sink_window,
            item.states,
        )


class _Step:
    """A step that runs when its result is taken."""

    ready_at = None

    def __init__(self, run: Callable[[], StepOutput]):
        self._run = run

    def result(self) -> StepOutput:
        return self._run()


class HashExecutor:
    """Runs the hash model on an array of slots, one for each token and group.

    The fold is kept with the KV of each position, so that a step costs no more than its own
    tokens (and their windows), and yet depends on the whole chain below it. Every
    ``audit_every``-th item is also folded from the start through the block tables, which reads
    every slot that is seen.

    Steps run when their results are taken, from copies of what was submitted. With a ``depth``
    above one, later steps have been planned by then, and a sampled token is fed to the next step
    here, before the scheduler has received it, but only for requests for which ``feeds`` is true.

    ``host_blocks`` holds the content of blocks as bytes, so that any store can keep them. With
    ``num_state_slots`` the model has recurrent layers, and takes no drafts.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 97,
        audit_every: int = 1,
        depth: int = 1,
        feeds: Callable[[Request], bool] = lambda request: True,
        windows: Windows = ONE_TABLE,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
    ):
        assert all(window is None or window > 1 for window in windows), windows
        self.depth = depth
        self.feeds_tokens = depth > 1
        self.feeds = feeds
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._audit_every = audit_every
        self._windows = windows
        self._num_items = 0
        self._slots = [_Slot(_FREED, _FREED, _FREED)] * (num_blocks * block_size)
        self._packing = struct.Struct(f"<{len(_Slot._fields) * block_size}q")
        self.host_blocks = [bytearray(self._packing.size) for _ in range(num_host_blocks)]
        self._carried = [_FREED] * num_state_slots
        # The token that was sampled last of each request, and its position.
        self._sampled: dict[str, tuple[int, int]] = {}

    def kv_capacity(self) -> int:
        return self._num_blocks

    def submit(self, batch: Batch) -> StepHandle:
        works = [_Work.of(item) for item in batch.items]
        for item in batch.items:
            if len(item.request.token_ids) < item.end and not self.feeds(item.request):
                raise RuntimeError(f"{item.request.request_id} is not one that tokens are fed to")
        gone = batch.finished_ids + batch.preempted_ids
        copies = batch.block_copies
        return _Step(lambda: self._run(works, copies, gone))

    def probe(self) -> NoModel:
        return NoModel()

    def close(self) -> None:
        pass

    def _run(
        self,
        works: Iterable[_Work],
        block_copies: Iterable[tuple[int, int]],
        gone: Iterable[str],
    ) -> StepOutput:
        for source, target in block_copies:
            self._copy(source, target)
        for request_id in gone:
            self._sampled.pop(request_id, None)
        output = StepOutput({})
        for work in works:
            if sampled := self._compute(work):
                self._sampled[work.request_id] = (work.end + len(sampled) - 1, sampled[-1])
                output.token_ids[work.request_id] = sampled
        return output

    def _copy(self, source: int, target: int) -> None:
        """Copy a block. Ids after those of the pool are host blocks."""
        size, first = self._block_size, self._num_blocks
        if source < first:
            slots = self._slots[source * size : (source + 1) * size]
        else:
            values = iter(self._packing.unpack(self.host_blocks[source - first]))
            slots = [_Slot(*each) for each in zip(values, values, values, strict=True)]
        if target < first:
            self._slots[target * size : (target + 1) * size] = slots
        else:
            self.host_blocks[target - first][:] = self._packing.pack(*chain.from_iterable(slots))

    def _compute(self, work: _Work) -> list[int]:
        """Run an item, and return the tokens that it samples."""
        tables, token_ids = work.tables, work.token_ids
        if len(token_ids) < work.end - work.start:
            position, token_id = self._sampled.get(work.request_id, (-1, -1))
            if position != work.end - 1 or len(token_ids) < work.end - work.start - 1:
                raise RuntimeError(f"{work.request_id} goes on from a token that never came")
            token_ids = [*token_ids, token_id]
        carried = self._carried_by(work)
        state, carried = self._forward(tables, token_ids, work.start, carried, work.sink_window)
        sampled = [state % self._vocab_size] if work.num_sampled else []
        if work.draft is not None:
            return self._verify(tables, work.draft, state, work.end)
        for position in range(work.end, work.end + self._num_multi_steps(work) - 1):
            state, carried = self._forward(
                tables, sampled[-1:], position, carried, work.sink_window
            )
            sampled.append(state % self._vocab_size)
        if work.states is not None:
            assert carried is not None
            self._carried[work.states.target] = carried
        return sampled

    def _carried_by(self, work: _Work) -> int | None:
        """Return the carried number that an item goes on from."""
        if work.states is None:
            return None
        if work.draft is not None or (work.states.source == NO_STATE) != (work.start == 0):
            raise RuntimeError(f"{work.request_id} has a state that is not of its tokens")
        return self._carried[work.states.source] if work.start else 0

    def _num_multi_steps(self, work: _Work) -> int:
        """Return how many of the allowed decode steps to take: varies from item to item."""
        return 1 + self._num_items % work.num_sampled if work.num_sampled else 0

    def _verify(self, tables: _Tables, draft: Draft, state: int, base: int) -> list[int]:
        """Return the right tokens of a draft, down one path, and the token after them.

        ``state`` is the state before the draft, whose KV is written to the slots from ``base`` on.
        The KV of the right path moves to the slots of its positions; the rest is left as garbage.
        """
        drafted: list[_Slots] = []
        paths: list[list[_Slots]] = []  # to each token, itself the last
        nodes = zip(draft.token_ids, draft.parents, strict=True)
        for index, (token_id, parent) in enumerate(nodes):
            path = paths[parent] if parent >= 0 else []
            before = path[-1] if path else self._read_slots(tables, base - 1)
            read = partial(self._read_path, tables, path, base)
            drafted.append(_next(self._windows, token_id, base + len(path), before, read))
            paths.append([*path, drafted[-1]])
            self._write(tables, base + index, drafted[-1])
        sampled = [state % self._vocab_size]
        while len(right := draft.path(sampled)) == len(sampled):
            sampled.append(drafted[right[-1]][0].state % self._vocab_size)
        self._move(tables, right, base)
        if self._is_audit():
            sampled[-1] = self._audited_state(tables, base + len(right)) % self._vocab_size
        return sampled

    def _move(self, tables: _Tables, path: Sequence[int], base: int) -> None:
        """Move the KV of a path to the slots of its positions, none of which is read later."""
        for place, index in enumerate(path):
            self._write(tables, base + place, self._read_slots(tables, base + index))

    def _forward(
        self,
        tables: _Tables,
        token_ids: Sequence[int],
        start: int,
        carried: int | None,
        sink_window: SinkWindow | None,
    ) -> tuple[int, int | None]:
        """Write the KV of tokens from position ``start`` on; return the state and the carried
        number after the last of them."""
        slots = self._read_slots(tables, start - 1) if start else _first(self._windows)
        read = partial(self._read_kv, tables)
        for position, token_id in enumerate(token_ids, start):
            carried = _carry(carried, token_id, position)
            slots = _next(self._windows, token_id, position, slots, read, carried, sink_window)
            self._write(tables, position, slots)
        if self._is_audit():
            return self._audited_state(
                tables, start + len(token_ids), carried, sink_window
            ), carried
        return slots[0].state, carried

    def _is_audit(self) -> bool:
        self._num_items += 1
        return self._num_items % self._audit_every == 0

    def _audited_state(
        self,
        tables: _Tables,
        num_tokens: int,
        carried: int | None = None,
        sink_window: SinkWindow | None = None,
    ) -> int:
        """Compute the state after a sequence from the KV in its slots, through its block tables."""
        folds: list[int] = []
        for group, window in enumerate(self._windows):
            before = _seen_before(window, sink_window, num_tokens - 1)
            seen = range(num_tokens) if before is None else [*before, num_tokens - 1]
            folds.append(reduce(_mix, [self._read_kv(tables, group, each) for each in seen], 0))
        return _state(folds, carried)

    def _read_path(
        self, tables: _Tables, path: Sequence[_Slots], base: int, group: int, position: int
    ) -> int:
        """Read the KV of a sequence followed by a path of a draft."""
        if position < base:
            return self._read_kv(tables, group, position)
        return path[position - base][group].kv

    def _read_kv(self, tables: _Tables, group: int, position: int) -> int:
        return self._slots[self._slot(tables[group], position)].kv

    def _read_slots(self, tables: _Tables, position: int) -> _Slots:
        return tuple(self._slots[self._slot(table, position)] for table in tables)

    def _write(self, tables: _Tables, position: int, slots: _Slots) -> None:
        for table, slot in zip(tables, slots, strict=True):
            self._slots[self._slot(table, position)] = slot

    def _slot(self, table: Sequence[int], position: int) -> int:
        block_id = table[position // self._block_size]
        if block_id < 0:
            raise AssertionError(f"position {position} was left behind, and is read or written")
        return block_id * self._block_size + position % self._block_size
