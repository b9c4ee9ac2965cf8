"""``python -m octavo.server.http.run_bounded MODULE BYTES SECONDS``: a module as a program that cannot
take more memory or processor time than that, and stands back behind everything else.

It is what ``own_process.py`` starts: bounds that a process sets for itself, before it reads what it
was sent, hold from its first line on.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

NICENESS = 10


def bound(num_bytes: int, seconds: int) -> None:
    """Bound this process, as far as the system can."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    try:
        import resource
    except ImportError:  # Windows
        return
    # Memory that is written to; files that are mapped to be read are none of it.
    for kind, most in (("RLIMIT_DATA", num_bytes), ("RLIMIT_CPU", seconds)):
        limit = getattr(resource, kind)
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, hard))


def main(module: str, num_bytes: str, seconds: str) -> int:
    bound(int(num_bytes), int(seconds))
    sys.argv = [module]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except MemoryError:
        error = f"it takes more than the {int(num_bytes) >> 20} MiB of memory that it may"
        sys.stdout.write(json.dumps({"error": error, "status": 400}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
