"""A rank that is stopped as soon as it has come up: see test_rank_processes.py."""

from __future__ import annotations

import os
import signal


def serve(membership, settings, home):
    os.kill(os.getpid(), signal.SIGSTOP)
