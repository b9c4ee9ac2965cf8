"""Loading and work of the first rank of a stage on another machine than the home rank.

``octavo.runtime.remote_rank`` runs `serve`, which differs from that of ``follower.py`` in what the
other machine may have otherwise: its model, its instruction set, its cores and its memory; and it
starts the other ranks of its stage there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from octavo.base.errors import ConfigError, EngineError, PeerEndedError
from octavo.kernels.cpu.library import choose, runnable
from octavo.links.facts import Facts, difference
from octavo.models.model_content import fingerprint
from octavo.runtime.home_connection import HomeConnection
from octavo.runtime.rank_memory import Membership
from octavo.runtime.rank_process import Message
from octavo.serving import follower
from octavo.serving.stage_ranks import StageRanks
from octavo.system import machine, numa


def serve(membership: Membership, settings: Message, home: HomeConnection) -> None:
    """Load the model, start as rank 0 does, and obey until the engine ends.

    Raises:
        ConfigError: this machine has another model, or cannot compute as rank 0 does.
        EngineError: another rank of the stage has ended.
    """
    _use_instructions(settings["facts"]["instruction set"])
    path = Path(settings["path"])
    if not path.exists():
        raise ConfigError(
            f"{path} is not on this machine: put the model that rank 0 has at the same path"
        )
    if (why := difference(model_facts(path), settings["facts"])) is not None:
        raise ConfigError(f"rank 0 ({path}): {why}")
    places = places_of_stage(settings["tp"], settings["threads"])
    own = {**settings, "places": [dataclasses.asdict(place) for place in places]}
    ranks = StageRanks(membership, places, own)
    abort = ranks.abort
    home.when_it_ends(lambda _: abort())
    ranks.when_one_ends(lambda error: home.fail(str(error)))
    facts = machine_facts(places)
    try:
        follower.serve(ranks.membership, own, _StageConnection(home, ranks, facts))
    except PeerEndedError:
        if not home.has_ended and (failure := ranks.wait_for_failure()) is not None:
            home.fail(str(failure))
        if home.reason is not None:
            raise EngineError(home.reason) from None  # for its last words
        raise
    finally:
        ranks.close()


def model_facts(path: Path) -> Facts:
    """Return what the machines of a pipeline must have in common, so that answers are those of one
    rank to the bit."""
    return {**fingerprint(path), "instruction set": choose()}


def machine_facts(places: Sequence[numa.RankPlace]) -> Message:
    """Return what results say about this machine, which has ranks at these places."""
    cpu = machine.cpu()
    return {
        "machine": os.uname().nodename,
        "cpu": cpu.model,
        "cores": cpu.usable_cores,
        "threads": sum(place.num_threads for place in places),
        "memory_bytes": machine.memory().total,
    }


def places_of_stage(tp: int, num_threads: int | None) -> tuple[numa.RankPlace, ...]:
    """Return the places of the ranks of a stage, which has this machine for itself. One rank has
    all of it, and is not pinned, as an engine of one rank is not.

    Raises:
        ConfigError: there is no thread, or no processor, for each of them.
    """
    if tp == 1:
        return (numa.RankPlace(num_threads or machine.cpu().usable_cores),)
    return numa.places(tp, numa.nodes(), num_threads and max(num_threads, tp))


class _StageConnection:
    """The connection to the home rank, of the rank that speaks for all of its stage.

    What the home rank says goes to the others once this rank has done it: so they find the weights
    that it has packed. ``facts``: about this machine, which the home rank is told.
    """

    def __init__(self, home: HomeConnection, ranks: StageRanks, facts: Message):
        self._home, self._ranks, self._facts = home, ranks, facts
        self._said: Message = {}

    def receive(self) -> Message | None:
        message = self._home.receive()
        self._said = message or {}
        return message

    def send(self, message: Message) -> None:
        self._ranks.send(self._said)
        of_all = [message, *self._ranks.receive()]
        if "free_bytes" in message:
            message = {**self._facts, "free_bytes": min(each["free_bytes"] for each in of_all)}
        self._home.send(message)


def _use_instructions(isa: str) -> None:
    """Use the instruction set of rank 0, on which the bits of a sum depend. ConfigError if it is
    not there."""
    here = runnable()
    if isa not in here:
        best = f"OCTAVO_ISA={here[0]}" if here else "another machine in place of this one"
        raise ConfigError(
            f"rank 0 computes with {isa} instructions, which this machine lacks, or octavo here "
            f"was built without: start rank 0 with {best}"
        )
    os.environ["OCTAVO_ISA"] = isa
