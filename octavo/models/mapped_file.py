"""Files of weights, mapped into memory."""

from __future__ import annotations

import errno
import mmap
import stat
import sys
from pathlib import Path

from octavo.base.errors import ModelFileError


def map_file(path: Path) -> mmap.mmap:
    """A whole file as private memory: numpy calls views of it writable, so that torch.from_numpy
    takes them without copy or warning, but what is written never reaches the file.

    ModelFileError if it cannot be opened, or is empty.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # before open(), which would wait for the writer of a pipe
            what = "a folder" if stat.S_ISDIR(mode) else "a device or pipe"
            raise ModelFileError(path, f"this is {what}, not a file")
        if path.stat().st_size == 0:
            raise ModelFileError(path, "the file is empty; download it again", offset=0)
        with path.open("rb") as file:
            try:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                if error.errno != errno.ENOMEM or sys.platform != "linux":
                    raise
                # Larger than memory and swap: Linux then wants it said that we will not write.
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                return mmap.mmap(file.fileno(), 0, flags=flags, prot=protection)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(path, f"the file cannot be opened: {reason}") from error
