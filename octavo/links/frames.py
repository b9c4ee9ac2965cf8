"""Frames of a connection between machines, and the order that they must have.

A frame is a header and its bytes. All numbers are little-endian::

    kind      u8      what its bytes are, see below
    zeros     3 bytes
    length    u32     of its bytes
    sequence  u64     0, 1, 2 ... for each direction of a connection

The kinds that a process takes, and how long they may be, follow from what it was started with.
Nothing is read of a frame whose header is not the next one that may come: with lengths bounded and
numbers in sequence, a frame that is cut, repeated, left out or too long ends its connection.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from octavo.base.errors import LinkError

# Kinds. HELLO: a token and facts; the first frame of who connects. MESSAGE: an object of JSON.
# WORDS: int32 words of a step. ROWS: float32 hidden states. BEAT: the sender is alive. END: the
# last one. PROBE: anything, which is sent back. BLOCK_NAMES: of KV blocks that can be had. WANTED:
# the names of those that are asked for. BLOCK: one of them.
HELLO, MESSAGE, WORDS, ROWS, BEAT, END, PROBE, BLOCK_NAMES, WANTED, BLOCK = range(1, 11)
_NAMES = (
    *("none", "HELLO", "MESSAGE", "WORDS", "ROWS", "BEAT", "END", "PROBE"),
    *("BLOCK_NAMES", "WANTED", "BLOCK"),
)

_HEADER = struct.Struct("<B3sIQ")
HEADER_BYTES = _HEADER.size
MAX_FRAME_BYTES = (1 << 32) - 1


class Header(NamedTuple):
    """The beginning of a frame that has ``num_bytes`` more."""

    kind: int
    num_bytes: int


class OutgoingFrames:
    """Writes the headers of one direction."""

    def __init__(self) -> None:
        self._next = 0

    def header(self, kind: int, num_bytes: int) -> bytes:
        """Return the header of the next frame."""
        header = _HEADER.pack(kind, b"\0\0\0", num_bytes, self._next)
        self._next += 1
        return header


class IncomingFrames:
    """Checks the headers of one direction.

    Args:
        limits: the most bytes of each kind that may come; others are refused.
    """

    def __init__(self, limits: Mapping[int, int]):
        self.limits = dict(limits)
        self._next = 0

    def header(self, data: bytes | bytearray) -> Header:
        """Return what the bytes of a header say. LinkError if no such frame may come now."""
        kind, zeros, num_bytes, sequence = _HEADER.unpack(data)
        if kind not in self.limits or zeros != b"\0\0\0":
            raise LinkError(f"a frame of kind {kind_name(kind)} cannot come here")
        if num_bytes > self.limits[kind]:
            raise LinkError(
                f"a {kind_name(kind)} frame of {num_bytes:,} bytes: {self.limits[kind]:,} are the "
                "most"
            )
        if sequence != self._next:
            raise LinkError(f"frame {sequence} came where frame {self._next} was due")
        self._next += 1
        return Header(kind, num_bytes)


def kind_name(kind: int) -> str:
    return _NAMES[kind] if 0 < kind < len(_NAMES) else str(kind)
