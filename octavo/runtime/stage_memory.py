"""The memory that the ranks of one stage share, where the other stages are on other machines.

    memory = StageMemory(place, tp=2)   in the process of the stage's first rank
    memory.first                        the membership of that rank
    memory.ticket(3)                    what the process of another rank of the stage is given

The links end at the first rank. It passes on to the others, in memory, what comes over them: the
messages of steps, and the hidden states of the stage before::

    home rank  ── link ──▶  first rank of a stage  ── ring of messages ──▶  its other ranks
    stage before  ── link ──▶  first rank  ── memory, as between stages ──▶  its other ranks
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octavo.base.errors import PeerEndedError
from octavo.kernels.cpu.group import ShmGroup
from octavo.runtime.rank_memory import Membership, Ticket, shared
from octavo.runtime.stage_links import PipelinePlace, ShmLink, StageLink, StepMessages


class StageMemory:
    """The memory of the ``tp`` ranks of a stage, made by the process of the first one.

    Args:
        place: of that process, with the links to other machines.
        is_crowded: there are more threads than cores, so that waiting goes to sleep sooner.

    Raises:
        ConfigError: the system has no such memory.
    """

    def __init__(self, place: PipelinePlace, tp: int, *, is_crowded: bool = False):
        self._tp, self._stage, self._is_crowded = tp, place.stage, is_crowded
        self._group = ShmGroup.create(tp, is_crowded=is_crowded)
        self._incoming: ShmGroup | None = None
        incoming = None
        if place.incoming is not None:
            self._incoming = ShmGroup.create(tp, is_crowded=is_crowded)
            incoming = SharedLink(place.incoming, ShmLink(self._incoming))
        messages = SharedMessages(place.messages, self._group)
        place = replace(place, messages=messages, incoming=incoming)
        self.first = Membership(self._first_rank, self.num_ranks, messages, self._group, place)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages."""
        return self._tp * self._stage.count

    @property
    def followers(self) -> range:
        """The ranks of the stage that have processes of their own."""
        return range(self._first_rank + 1, self._first_rank + self._tp)

    @property
    def _first_rank(self) -> int:
        return (self._stage.count - 1 - self._stage.index) * self._tp

    def ticket(self, rank: int) -> Ticket:
        """Return what the process of a rank needs to attach; see ``RankMemory.ticket``."""
        place = rank - self._first_rank
        return {
            "rank": rank,
            "size": self.num_ranks,
            "local_rank": place,
            "stage": [self._stage.index, self._stage.count],
            "is_crowded": self._is_crowded,
            "messages": shared(self._group, place, self._tp),
            "group": shared(self._group, place, self._tp),
            "incoming": shared(self._incoming, place, self._tp),
            "outgoing": None,
            "host": None,
        }

    def abort(self) -> None:
        """End all waiting on this machine, for ever. May be called from any thread."""
        self._group.abort()
        if self._incoming is not None:
            self._incoming.abort()

    def close(self) -> None:
        """Leave the memory. May be repeated."""
        self._group.close()
        if self._incoming is not None:
            self._incoming.close()


class SharedMessages:
    """The ``StepMessages`` of the first rank of a stage, which the other ranks there get from it.

    Args:
        there: from the home rank; at the home rank, to other machines.
        here: to the other ranks of the stage.
    """

    def __init__(self, there: StepMessages, here: StepMessages):
        self._there, self._here = there, here

    @property
    def room(self) -> int:
        return min(self._there.room, self._here.room)

    def pieces(self, num_words: int) -> int:
        return max(self._there.pieces(num_words), self._here.pieces(num_words))

    def send(self, words: array[int]) -> None:
        self._there.send(words)
        self._here.send(words)

    def receive(self) -> np.ndarray:
        message = self._there.receive()
        words = array("i")
        words.frombytes(message.tobytes())
        self._here.send(words)
        return message

    def abort(self) -> None:
        self._there.abort()
        self._here.abort()


class SharedLink:
    """The ``StageLink`` at the first rank of a stage, of which all ranks there get the values.

    Args:
        there: from the stage before.
        here: to the other ranks of the stage.
    """

    def __init__(self, there: StageLink, here: StageLink):
        self._there, self._here = there, here

    def open(self, widths: Sequence[int], max_tokens: int, depth: int) -> None:
        self._there.open(widths, max_tokens, depth)
        self._here.open(widths, max_tokens, depth)

    def send(self, number: int, values: Sequence[np.ndarray]) -> None:
        raise AssertionError("values come in here")

    def fail(self, number: int, reason: str) -> None:
        raise AssertionError("values come in here")

    def receive(self, number: int, values: Sequence[np.ndarray]) -> None:
        try:
            self._there.receive(number, values)
        except PeerEndedError:
            raise
        except Exception as error:
            self._here.fail(number, str(error))
            raise
        self._here.send(number, values)

    def abort(self) -> None:
        self._there.abort()
        self._here.abort()
