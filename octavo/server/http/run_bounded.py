"""Run a module as a program with bounds on memory and processor time, at low priority.

    python -m octavo.server.http.run_bounded MODULE BYTES SECONDS

``bounded_subprocess.py`` starts it: bounds that a process sets for itself, before it reads its
input, hold from its first line on.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

NICENESS = 10


def bound(num_bytes: int, seconds: int) -> None:
    """Set the bounds of this process, as far as the system can."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    try:
        import resource
    except ImportError:  # Windows
        return
    # RLIMIT_DATA counts memory that is written to, not files that are mapped to be read.
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
