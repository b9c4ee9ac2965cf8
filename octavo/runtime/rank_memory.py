"""The memory that the ranks of an engine share, and what each rank has of it.

    memory = RankMemory(tp=2, pp=3)     in the engine's process
    memory.home                         the membership of rank 0, the home rank
    memory.ticket(4)                    what the process of rank 4 is given, with descriptors
    Membership.attach(ticket)           its membership, in that process, which has inherited them

Ranks are counted from the last stage on, whose first rank is the home rank::

    tp = 2, pp = 3     stage 2: ranks 0, 1     stage 1: ranks 2, 3     stage 0: ranks 4, 5

All share a ring of messages. The ranks of a stage share what they compute, if there are several;
and from each stage to the next there is a link. A tensor-parallel group without stages needs one
memory for both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from octavo.kernels.cpu.group import ShmGroup
from octavo.kernels.cpu.library import Library
from octavo.kernels.parts import Stage
from octavo.runtime.host_rows import HostFile
from octavo.runtime.stage_links import PipelinePlace, ShmLink, StepMessages

# The entries of a ticket that are access to memory, where a rank has it.
SHARED = ("messages", "group", "incoming", "outgoing")

# What the process of a rank is given: objects of JSON.
Ticket = dict[str, Any]


def shared(group: ShmGroup | None, place: int, size: int) -> list[int] | None:
    """Return the entry of a ticket for rank ``place`` of a group; None for none."""
    return None if group is None else [group.fd, place, size]


def descriptors(ticket: Ticket) -> list[int]:
    """Return the descriptors of a ticket, each once."""
    host = [] if ticket["host"] is None else [ticket["host"]]
    return sorted({*host, *(ticket[name][0] for name in SHARED if ticket[name] is not None)})


@dataclass(frozen=True, slots=True)
class Membership:
    """Access of a rank to the memory.

    Args:
        rank: its number among the ``size`` ranks of all stages.
        messages: its end of the messages of steps.
        group: the ranks of its stage; None: it is the only one.
        pipeline: None: there is one stage.
        local_rank: its number among the ranks of its machine.
        host: memory for the host KV cache of all ranks; None: each has its own.
    """

    rank: int
    size: int
    messages: StepMessages
    group: ShmGroup | None
    pipeline: PipelinePlace | None
    local_rank: int = 0
    host: HostFile | None = None

    @classmethod
    def attach(cls, ticket: Ticket) -> Membership:
        """Open the memory of a ticket, whose descriptors belong to the membership from then on."""
        opened: dict[int, ShmGroup] = {}  # by descriptor: some uses have one memory together
        stage = Stage(*ticket["stage"])

        def group_of(name: str) -> ShmGroup | None:
            if ticket[name] is None:
                return None
            fd, place, size = ticket[name]
            if fd not in opened:
                opened[fd] = ShmGroup.attach(fd, place, size, is_crowded=ticket["is_crowded"])
            return opened[fd]

        messages, group, incoming, outgoing = map(group_of, SHARED)
        assert messages is not None
        pipeline = None
        if not stage.is_whole:
            links = (None if each is None else ShmLink(each) for each in (incoming, outgoing))
            pipeline = PipelinePlace(stage, messages, *links)
        host = None if ticket["host"] is None else HostFile(ticket["host"])
        numbers = ticket["rank"], ticket["size"]
        return cls(*numbers, messages, group, pipeline, ticket["local_rank"], host)


class RankMemory:
    """The memory of ``tp`` ranks in each of ``pp`` stages, made by the process of the home rank.

    Args:
        is_crowded: there are more threads than cores, so that waiting goes to sleep sooner.

    Raises:
        ConfigError: the system has no such memory.
    """

    def __init__(
        self,
        tp: int,
        pp: int = 1,
        *,
        is_crowded: bool = False,
        library: Library | None = None,
        **options: int,
    ):
        self._tp, self._pp, self.is_crowded, self._library = tp, pp, is_crowded, library

        def create(size: int) -> ShmGroup:
            return ShmGroup.create(size, is_crowded=is_crowded, library=library, **options)

        self.host = HostFile.create()
        self._messages = create(tp * pp)
        self._groups = [create(tp) for _ in range(pp)] if tp > 1 < pp else []
        self._links = [create(1 + tp) for _ in range(pp - 1)]

    @property
    def num_ranks(self) -> int:
        return self._tp * self._pp

    @property
    def followers(self) -> range:
        """The ranks that have processes of their own."""
        return range(1, self.num_ranks)

    @property
    def home(self) -> Membership:
        """The membership of rank 0."""
        if self._pp == 1:
            return Membership(0, self.num_ranks, self._messages, self._messages, None)
        incoming = ShmGroup.attach(
            *(os.dup(self._links[-1].fd), 1, 1 + self._tp),
            is_crowded=self.is_crowded,
            library=self._library,
        )
        last = Stage(self._pp - 1, self._pp)
        pipeline = PipelinePlace(last, self._messages, ShmLink(incoming))
        group = self._groups[-1] if self._groups else None
        return Membership(0, self.num_ranks, self._messages, group, pipeline)

    def ticket(self, rank: int) -> Ticket:
        """Return what the process of a follower needs to attach: numbers for JSON, among them
        `descriptors` of this process, which it inherits."""
        tp, pp = self._tp, self._pp
        place, stage = rank % tp, Stage(pp - 1 - rank // tp, pp)
        sends = place == 0 and not stage.is_last
        group = self._messages if pp == 1 else self._groups[stage.index] if self._groups else None
        before = None if stage.is_first else self._links[stage.index - 1]
        return {
            "rank": rank,
            "size": self.num_ranks,
            "local_rank": rank,
            "stage": [stage.index, stage.count],
            "is_crowded": self.is_crowded,
            "messages": shared(self._messages, rank, self.num_ranks),
            "group": shared(group, place, tp),
            "incoming": shared(before, 1 + place, 1 + tp),
            "outgoing": shared(self._links[stage.index] if sends else None, 0, 1 + tp),
            "host": self.host.fd,
        }

    def abort(self) -> None:
        """End all waiting, of all ranks, for ever. May be called from any thread."""
        for group in (self._messages, *self._groups, *self._links):
            group.abort()

    def close(self) -> None:
        """Leave the memory, as the home rank too. May be repeated."""
        for group in (self._messages, *self._groups, *self._links):
            group.close()
        self.host.close()
