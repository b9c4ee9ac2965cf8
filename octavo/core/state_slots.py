"""Owner of the slots of recurrent states, which requests, steps and snapshots hold.

State spaces, linear attention and short convolutions have a state of fixed size, which each token
changes. A *slot* holds those of all such layers of a model, for one sequence. A slot is a number
here; the memory behind it belongs to the executor.

A step changes no state in place. It reads the slot that the step before has written, and writes
another one::

    chain   4 ── step ── 9 ── step ── 2     4: of all computed tokens; 9, 2: of steps in flight
    spare   7                               later steps write to it; 4 comes here in the end

So a step that raised can be run again, and a *snapshot* is a slot that is left as it is: at the end
of a block the prefix cache may keep it, the sequence takes another, and nothing is copied. A
request with the same prefix begins its chain with it. A prefix is known as far as there are blocks
of it *and* a snapshot at their end; a step therefore stops where one is wanted::

    prompt                           answer
    |------ ... ------|------|---    |------|------|------|---
                      ^                            ^
                      its last whole block         the last whole block so far: the next turn of a
                                                   chat begins with prompt and answer

and at every 512 tokens. Of an answer only the last two snapshots are kept beside those, each in
place of an older one. Two, since the next turn may have the end of an answer in other tokens: a
stop string is cut off, a chat template trims.

Each running request has the slots that it needs from its admission to its end, so none waits for
one in between; snapshots take what is left, and the oldest one goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from octavo.base.errors import ConfigError
from octavo.core.prefix_cache import NoPrefixCache, PrefixCache
from octavo.core.request import Request
from octavo.core.state_types import NO_STATE, StateChain, StateStep

# Tokens between two snapshots of a long sequence. More snapshots would take memory from other
# sequences; fewer would have more tokens computed again.
SNAPSHOT_TOKENS = 512
# Snapshots of an answer, beside those.
_LAST_SNAPSHOTS = 2


class States(Protocol):
    """The state slots, as the scheduler and the block manager call them; by default there are none.

    ``exist``: whether the model has recurrent layers.
    """

    @property
    def exist(self) -> bool: ...

    def admit(self, request: Request, snapshot: int) -> bool:
        """Give a request its slots, the first of which it reads: a snapshot, or NO_STATE. Returns
        False, and changes nothing, if there are too few."""
        return True

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` tokens from position ``start`` on one step may
        compute."""
        return num_tokens

    def begin(self, request: Request) -> StateStep | None:
        """Return the slots of one more step; None for a model without states."""
        return None

    def end(self, request: Request) -> None:
        """Note that the oldest step in flight has ended."""
        return None

    def withdraw(self, request: Request) -> None:
        """Forget the last step in flight."""
        return None

    def keep(self, request: Request, block_id: int) -> None:
        """Offer the state at the end of the computed tokens, which end with this block."""
        return None

    def drop(self, slot: int) -> None:
        """Note that the prefix cache has forgotten a snapshot; NO_STATE is none."""
        return None

    def free(self, request: Request) -> None:
        """Take back all slots of a request."""
        return None

    @property
    def num_used(self) -> int:
        """Number of slots that requests hold."""
        ...

    def violations(self, requests: Iterable[Request]) -> Iterator[str]:
        """Yield every inconsistency. ``requests`` are all that may hold slots."""
        return iter(())


class NoStates(States):
    """The state slots of models without recurrent layers."""

    exist = False
    num_used = 0


class StateSlots:
    """Owns every slot. Like blocks, each is used, cached (a snapshot that no request reads), or
    free.

    Args:
        block_size: of the prefix cache; snapshots are at the ends of blocks.
        depth: steps that one request may be in at once.
        snapshot_tokens: between two snapshots of a sequence, beside those at the end of its prompt
            and of its answer.

    Raises:
        ConfigError: there are too few slots for one request.
    """

    exist = True

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        prefix_cache: PrefixCache,
        depth: int = 1,
        snapshot_tokens: int = SNAPSHOT_TOKENS,
    ):
        if num_slots < least_slots(depth):
            raise ConfigError(
                f"{num_slots} slots for states are too few: {least_slots(depth)} serve one request"
            )
        self.num_slots = num_slots
        self.num_cached = 0
        self._block_size = block_size
        self._cache = prefix_cache
        self._has_snapshots = not isinstance(prefix_cache, NoPrefixCache)
        self._per_request = slots_per_request(depth)
        self._interval = max(1, snapshot_tokens // block_size) * block_size
        self._ref_counts = [0] * num_slots
        # Slots that no request holds, next to be reused first: the free ones, then the cached, by
        # age.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._idle)

    # -- slots of a request ------------------------------------------------------------------

    def admit(self, request: Request, snapshot: int) -> bool:
        is_idle = snapshot != NO_STATE and self._ref_counts[snapshot] == 0
        if len(self._idle) - is_idle < self._per_request:
            return False
        if snapshot != NO_STATE:
            self._acquire(snapshot)
        request.states = StateChain([snapshot], self._take(self._per_request))
        return True

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        if not self._has_snapshots or not request.params.cache_prompt:
            return num_tokens
        return min(num_tokens, self._next_border(request, start) - start)

    def begin(self, request: Request) -> StateStep:
        chain = _chain_of(request)
        step = StateStep(chain.slots[-1], chain.spare.pop())
        chain.slots.append(step.target)
        return step

    def end(self, request: Request) -> None:
        chain = _chain_of(request)
        self._release(chain.slots.pop(0))
        if len(chain.slots) + len(chain.spare) < self._per_request:
            chain.spare += self._take(1)  # the one just released: no other request held it

    def withdraw(self, request: Request) -> None:
        chain = _chain_of(request)
        chain.spare.append(chain.slots.pop())

    def keep(self, request: Request, block_id: int) -> None:
        num_computed, chain = request.num_computed_tokens, _chain_of(request)
        if num_computed != self._next_border(request, num_computed - 1) or not self._idle:
            return
        slot = chain.slots[0]
        if not self._cache.keep_state(block_id, slot):
            return
        if num_computed % self._interval and num_computed != self._last_of_prompt(request):
            chain.passing.append((block_id, slot))
        if len(chain.passing) > _LAST_SNAPSHOTS:
            self._forget(*chain.passing.pop(0))
        chain.spare += self._take(1)  # for the one that is not written to any more

    def _forget(self, block_id: int, slot: int) -> None:
        """Give up a snapshot, if it is still there."""
        if block_id in self._cache and self._cache.state_of(block_id) == slot:
            self._cache.forget_state(slot)
            self.drop(slot)

    def drop(self, slot: int) -> None:
        if slot != NO_STATE and self._ref_counts[slot] == 0:
            self.num_cached -= 1
            self._idle.move_to_end(slot, last=False)

    def free(self, request: Request) -> None:
        if request.states is not None:
            for slot in (*request.states.slots, *request.states.spare):
                self._release(slot)
            request.states = None

    def _next_border(self, request: Request, start: int) -> int:
        """Return the first position after ``start`` at which a snapshot is wanted."""
        size, num_known = self._block_size, len(request.token_ids)
        if start >= num_known - 1:  # an answer goes on: at each block, as any may be its last
            return (start // size + 1) * size
        borders = (
            (start // self._interval + 1) * self._interval,
            self._last_of_prompt(request),
            num_known // size * size,  # of all that is computed again after a preemption
        )
        return min(border for border in borders if border > start)

    def _last_of_prompt(self, request: Request) -> int:
        """Return the end of the last whole block up to which the same prompt could be found."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    # -- slots by number ---------------------------------------------------------------------

    def _take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            slot, _ = self._idle.popitem(last=False)
            if self._cache.has_state(slot):
                self._cache.forget_state(slot)
                self.num_cached -= 1
            self._ref_counts[slot] = 1
            taken.append(slot)
        return taken

    def _acquire(self, slot: int) -> None:
        if self._ref_counts[slot] == 0:
            del self._idle[slot]
            self.num_cached -= 1  # only snapshots are acquired
        self._ref_counts[slot] += 1

    def _release(self, slot: int) -> None:
        if slot == NO_STATE:
            return
        self._ref_counts[slot] -= 1
        assert self._ref_counts[slot] >= 0
        if self._ref_counts[slot] > 0:
            return
        self._idle[slot] = None
        if self._cache.has_state(slot):
            self.num_cached += 1
        else:
            self._idle.move_to_end(slot, last=False)

    # -- audit -------------------------------------------------------------------------------

    def violations(self, requests: Iterable[Request]) -> Iterator[str]:
        held = [0] * self.num_slots
        for request in requests:
            chain = request.states
            if chain is None:
                continue
            own = [slot for slot in (*chain.slots, *chain.spare) if slot != NO_STATE]
            for slot in own:
                held[slot] += 1
            if len(own) < self._per_request:
                yield f"{request.request_id} has too few slots for states"
        if held != self._ref_counts:
            yield "reference counts of slots and the chains of requests disagree"
        if {slot for slot, count in enumerate(held) if count == 0} != set(self._idle):
            yield "a held slot is free, or a slot is lost"
        num_cached = sum(self._cache.has_state(slot) for slot in self._idle)
        if num_cached != self.num_cached:
            yield f"{num_cached} states are cached, not {self.num_cached}"


def _chain_of(request: Request) -> StateChain:
    assert request.states is not None, f"{request.request_id} has no states"
    return request.states


def slots_per_request(depth: int) -> int:
    """Return the slots that a running request holds: its state, and one for each step in flight."""
    return depth + 1


def least_slots(depth: int) -> int:
    """Return the slots that one request needs which begins with a snapshot."""
    return slots_per_request(depth) + 1
