"""Loading and work of a rank on another machine than the home rank, which has one stage.

``octavo.runtime.remote_rank`` runs `serve`, which differs from that of ``follower.py`` in what the
other machine may have otherwise: its model, its instruction set, its cores and its memory.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.kernels.cpu.library import choose
from octavo.links.facts import Facts, difference
from octavo.runtime.home_connection import HomeConnection
from octavo.runtime.rank_memory import Seat
from octavo.runtime.rank_process import Message
from octavo.serving import follower
from octavo.serving.model_content import model_content
from octavo.system import numa


def serve(seat: Seat, settings: Message, home: HomeConnection) -> None:
    """Load the model, start as rank 0 does, and obey until the engine ends.

    Raises:
        ConfigError: this machine has another model, or cannot compute as rank 0 does.
    """
    # The bits of a sum depend on the instruction set: that of rank 0 is taken, if there is it here.
    os.environ["OCTAVO_ISA"] = settings["facts"]["instruction set"]
    path = Path(settings["path"])
    if not path.exists():
        raise ConfigError(
            f"{path} is not on this machine: put the model that rank 0 has at the same path"
        )
    if (why := difference(model_facts(path), settings["facts"])) is not None:
        raise ConfigError(f"rank 0 ({path}): {why}")
    place = numa.places(1, numa.nodes(), settings["threads"])[0]
    places = {seat.rank: dataclasses.asdict(place)}
    follower.serve(seat, {**settings, "places": places}, home)


def model_facts(path: Path) -> Facts:
    """Return what the machines of a pipeline must have in common, so that answers are those of one
    rank to the bit."""
    return {"model content": model_content(path), "instruction set": choose()}
