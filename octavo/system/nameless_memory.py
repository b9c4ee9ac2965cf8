"""Memory without a name, which a process hands to others by a file descriptor."""

from __future__ import annotations

import os
import sys
import tempfile


def open_memory(name: str, num_bytes: int) -> int:
    """Return a file descriptor of so many bytes of memory, all 0, which the caller closes.

    Args:
        name: which the system shows to operators; two may be alike.
    """
    if sys.platform == "linux":
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd
