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

# The entries of a ticket that are descriptors, where there are any.
DESCRIPTORS = ("messages", "group", "incoming", "outgoing", "host")


def descriptors(ticket: dict[str, Any]) -> list[int]:
    """Return the descriptors of a ticket."""
    return [ticket[name] for name in DESCRIPTORS if ticket[name] is not None]


@dataclass(frozen=True, slots=True)
class Membership:
    """Access of a rank to the memory.

    Args:
        rank: its number among the ``size`` ranks of all stages.
        messages: its end of the messages of steps.
        group: the ranks of its stage; None: it is the only one.
        pipeline: None: there is one stage.
        host: memory for the host KV cache of all ranks; None: each has its own.
    """

    rank: int
    size: int
    messages: StepMessages
    group: ShmGroup | None
    pipeline: PipelinePlace | None
    host: HostFile | None = None

    @classmethod
    def attach(cls, ticket: dict[str, Any]) -> Membership:
        """Open the memory of a ticket, whose descriptors belong to the membership from then on."""
        rank, tp, pp = ticket["rank"], ticket["tp"], ticket["pp"]
        place, stage = rank % tp, Stage(pp - 1 - rank // tp, pp)
        more = {"is_crowded": ticket["is_crowded"]}
        messages = ShmGroup.attach(ticket["messages"], rank, tp * pp, **more)
        host = HostFile(ticket["host"])
        if pp == 1:
            return cls(rank, tp, messages, messages, None, host)
        group = incoming = outgoing = None
        if ticket["group"] is not None:
            group = ShmGroup.attach(ticket["group"], place, tp, **more)
        if ticket["incoming"] is not None:
            incoming = ShmLink(ShmGroup.attach(ticket["incoming"], 1 + place, 1 + tp, **more))
        if ticket["outgoing"] is not None:
            outgoing = ShmLink(ShmGroup.attach(ticket["outgoing"], 0, 1 + tp, **more))
        pipeline = PipelinePlace(stage, messages, incoming, outgoing)
        return cls(rank, tp * pp, messages, group, pipeline, host)


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
    def home(self) -> Membership:
        """The membership of rank 0."""
        if self._pp == 1:
            return Membership(0, self.num_ranks, self._messages, self._messages, None, self.host)
        incoming = ShmGroup.attach(
            *(os.dup(self._links[-1].fd), 1, 1 + self._tp),
            is_crowded=self.is_crowded,
            library=self._library,
        )
        last = Stage(self._pp - 1, self._pp)
        pipeline = PipelinePlace(last, self._messages, ShmLink(incoming))
        group = self._groups[-1] if self._groups else None
        return Membership(0, self.num_ranks, self._messages, group, pipeline, self.host)

    def ticket(self, rank: int) -> dict[str, Any]:
        """Return what the process of a follower needs to attach: numbers for JSON, among them
        `descriptors` of this process, which it inherits."""
        stage = self._pp - 1 - rank // self._tp
        chosen = {
            "messages": self._messages,
            "group": self._groups[stage] if self._groups else None,
            "incoming": self._links[stage - 1] if stage > 0 else None,
            "outgoing": (
                self._links[stage] if stage < self._pp - 1 and rank % self._tp == 0 else None
            ),
        }
        sizes = {"rank": rank, "tp": self._tp, "pp": self._pp, "is_crowded": self.is_crowded}
        fds = {name: group and group.fd for name, group in chosen.items()}
        return {**sizes, **fds, "host": self.host.fd}

    def abort(self) -> None:
        """End all waiting, of all ranks, for ever. May be called from any thread."""
        for group in (self._messages, *self._groups, *self._links):
            group.abort()

    def close(self) -> None:
        """Leave the memory, as the home rank too. May be repeated."""
        for group in (self._messages, *self._groups, *self._links):
            group.close()
        self.host.close()
