"""Find where a request on a connection ends and the next one begins, without any leniency.

Two programs that disagree on this can be made to see different requests in the same bytes (request
smuggling). So ambiguous framing is refused, even where RFC 9112 would allow leniency. llhttp,
strict itself, then parses what has passed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.http.errors import HttpError
from octavo.server.settings import MAX_HEADER_BYTES, MAX_HEADERS, MAX_URL_BYTES

Header = tuple[bytes, bytes]

# A lone CR or LF, or any other control character but the tab.
_FORBIDDEN = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?=[^\n])")
# One space between the parts; a path, not a whole URL; no fragment.
_REQUEST_LINE = re.compile(rb"[A-Z]{1,32} (/[!-\"$-~]*) HTTP/1\.[01]")
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r]*", re.IGNORECASE)

_MAX_LINE_BYTES = MAX_URL_BYTES + 64
_MAX_CHUNK_LINE_BYTES = 10

# Many tiny chunks cost much for few bytes.
_FREE_CHUNKS = 1024
_MIN_MEAN_CHUNK_BYTES = 64


def header_length(data: bytes, num_checked: int) -> int:
    """Return the length of the header at the beginning of ``data``, 0 if it is incomplete.

    The length includes the empty line that ends it.

    Args:
        num_checked: bytes of ``data`` that an earlier call for the same request has seen.

    Raises:
        HttpError: it is no header, or too long; as soon as the bytes show it.
    """
    end = data.find(b"\r\n\r\n", max(0, num_checked - 3)) + 4
    end = 0 if end < 4 else end
    if _FORBIDDEN.search(data, max(0, num_checked - 1), end or len(data)):
        raise HttpError(400, "The header has control characters or lines without CRLF.")
    start = 2 if data.startswith(b"\r\n") else 0  # one empty line before a request is usual
    line_end = data.find(b"\r\n", start, start + _MAX_LINE_BYTES + 2)
    if line_end >= 0:
        _check_request_line(data[start:line_end])
    elif len(data) - start > _MAX_LINE_BYTES:
        raise HttpError(414, f"The URL has more than {MAX_URL_BYTES} bytes.")
    if max(end, 0 if end else len(data)) > MAX_HEADER_BYTES:
        raise HttpError(431, f"The header has more than {MAX_HEADER_BYTES} bytes.")
    return end


def _check_request_line(line: bytes) -> None:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise HttpError(400, "The first line is not METHOD /PATH HTTP/1.1.")
    if len(match[1]) > MAX_URL_BYTES:
        raise HttpError(414, f"The URL has more than {MAX_URL_BYTES} bytes.")


def without_upgrade(header: bytes) -> bytes:
    """Return the header without an offer of another protocol, which a server may ignore.

    llhttp would take the request's body for the first bytes of that protocol.
    """
    return _UPGRADE.sub(b"", header)


def create_body(headers: Sequence[Header], version: str) -> SizedBody | ChunkedBody:
    """Return the framing of the body that follows these headers (names in lower case).

    Raises:
        HttpError: they are ambiguous about it, or about the host that is meant.
    """
    if len(headers) > MAX_HEADERS:
        raise HttpError(431, f"The header has more than {MAX_HEADERS} fields.")
    hosts = _values(headers, b"host")
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        raise HttpError(400, "HTTP/1.1 needs exactly one Host header.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HttpError(400, "The Host header is malformed.")
    lengths = _values(headers, b"content-length")
    encodings = _values(headers, b"transfer-encoding")
    if not encodings:
        if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
            raise HttpError(400, "The Content-Length is malformed.")
        return SizedBody(int(lengths[0]) if lengths else 0)
    if lengths or version != "1.1" or [e.lower() for e in encodings] != [b"chunked"]:
        raise HttpError(400, "The only Transfer-Encoding is chunked, without a Content-Length.")
    return ChunkedBody()


def _values(headers: Sequence[Header], wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


class SizedBody:
    """A body of known length."""

    def __init__(self, length: int):
        self._num_left = length

    @property
    def is_complete(self) -> bool:
        return not self._num_left

    def consume(self, data: bytes) -> int:
        """Count the bytes of this body at the beginning of ``data`` as read, and return their
        number."""
        length = min(self._num_left, len(data))
        self._num_left -= length
        return length


class ChunkedBody:
    """A body in chunks: ``size CRLF data CRLF`` until one of size 0.

    Extensions and trailers are refused: clients do not use them, and parsers differ over them.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._line = b""  # of a size that is not all there
        self._num_left = 0  # of the chunk's data and its CRLF, which llhttp checks
        self._is_last = False
        self._num_chunks = 0
        self._num_bytes = 0

    def consume(self, data: bytes) -> int:
        """Count the bytes of this body at the beginning of ``data`` as read, and return their
        number.

        Raises:
            HttpError: the chunks are malformed.
        """
        position = 0
        while position < len(data) and not self.is_complete:
            if self._num_left:
                length = min(self._num_left, len(data) - position)
                self._num_left -= length
                position += length
                continue
            line_end = data.find(b"\n", position, position + _MAX_CHUNK_LINE_BYTES) + 1
            line_end = line_end or min(len(data), position + _MAX_CHUNK_LINE_BYTES)
            self._line += data[position:line_end]
            position = line_end
            if self._line.endswith(b"\n"):
                self._begin_chunk(self._line)
                self._line = b""
            elif len(self._line) >= _MAX_CHUNK_LINE_BYTES:
                raise HttpError(400, "The size of a chunk is malformed.")
        return position

    def _begin_chunk(self, line: bytes) -> None:
        if self._is_last:
            if line != b"\r\n":
                raise HttpError(400, "Trailers are not supported.")
            self.is_complete = True
            return
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise HttpError(400, "The size of a chunk is malformed.")
        size = int(match[1], 16)
        self._is_last = size == 0
        self._num_left = size + 2 if size else 0
        self._num_bytes += size
        self._num_chunks += 1
        if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _MIN_MEAN_CHUNK_BYTES:
            raise HttpError(400, "The chunks are too small.")
