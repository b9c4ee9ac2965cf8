"""Loading and work of a rank on another machine than the home rank, which has one stage.

``octavo.runtime.remote_rank`` runs `serve`, which differs from that of ``follower.py`` in what the
other machine may have otherwise: its model, its instruction set, its cores and its memory.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.kernels.cpu.library import choose, runnable
from octavo.links.facts import Facts, difference
from octavo.runtime.home_connection import HomeConnection
from octavo.runtime.rank_memory import Membership
from octavo.runtime.rank_process import Message
from octavo.serving import follower
from octavo.serving.model_content import model_content
from octavo.system import numa


def serve(membership: Membership, settings: Message, home: HomeConnection) -> None:
    """Load the model, start as rank 0 does, and obey until the engine ends.

    Raises:
        ConfigError: this machine has another model, or cannot compute as rank 0 does.
    """
    _use_instructions(settings["facts"]["instruction set"])
    path = Path(settings["path"])
    if not path.exists():
        raise ConfigError(
            f"{path} is not on this machine: put the model that rank 0 has at the same path"
        )
    if (why := difference(model_facts(path), settings["facts"])) is not None:
        raise ConfigError(f"rank 0 ({path}): {why}")
    place = numa.places(1, numa.nodes(), settings["threads"])[0]
    places = {membership.rank: dataclasses.asdict(place)}
    follower.serve(membership, {**settings, "places": places}, home)


def model_facts(path: Path) -> Facts:
    """Return what the machines of a pipeline must have in common, so that answers are those of one
    rank to the bit."""
    return {"model content": model_content(path), "instruction set": choose()}


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
