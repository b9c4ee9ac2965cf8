"""Facts that processes of an engine, or of a server, on several machines must have in common."""

from __future__ import annotations

import sys

from octavo import __version__
from octavo.kernels.cpu.abi import OCT_ABI_VERSION
from octavo.links.facts import Facts


def software_facts() -> Facts:
    """Return what this process runs, as far as others of other versions would compute, or say,
    something else."""
    return {
        "octavo": __version__,
        "kernel ABI": OCT_ABI_VERSION,
        "byte order": sys.byteorder,
    }


def stage_facts(num_stages: int, from_stage: int) -> Facts:
    """Return what both ends of a link from one stage to the next must have in common."""
    return {**software_facts(), "stages": num_stages, "from stage": from_stage}
