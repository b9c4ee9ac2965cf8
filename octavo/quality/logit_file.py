"""A file of the probabilities that a model gives to the tokens of a text: a base of comparisons.

Little endian, one part after the other::

    magic         8 bytes, "OCTLOGIT"
    header size   uint32
    header        JSON, padded with spaces; see Header
    token ids     int32   [num_windows, ctx]
    nll           float32 [num_scored]  -ln p of each scored token, exact
    rows          num_scored times: top int32, step float32, codes uint16 [vocab_size]

A row holds the log-probabilities of all tokens at one position, as distances from ``top``, the
most probable token: ``ln p(token) = ln p(top) - step * code``, where ln p(top) follows from the sum
of all being 1. ``step`` is the largest distance of the row, or MAX_DISTANCE if that is less, over
65535. A token that is further away than MAX_DISTANCE is put there.

How exact that is: a distance is off by at most h = step / 2 <= 3.1e-4, a log-probability by at most
2 h (its own distance, and the sum). For a distribution p whose distances are off by at most h, the
divergence KL(p || coded p) is at most h^2 / 2 <= 4.7e-8 (Hoeffding's lemma): that is all that the
file adds to a divergence from itself. One from another model q it moves, either way, by at most 2 h
times the mean of |ln p / q| under p, to first order. Tokens beyond MAX_DISTANCE have e^-40 = 4e-18
of the most probable one's mass, and count for nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from octavo.base.errors import BenchmarkError
from octavo.base.files import NewFile
from octavo.quality.scoring import ScoredRow
from octavo.quality.windows import SCORES, ScoringWindows

MAGIC = b"OCTLOGIT"
VERSION = 1
MAX_DISTANCE = 40.0
_LAST_CODE = 65535
_MAX_STEP = np.float32(MAX_DISTANCE / _LAST_CODE)
_MAX_HEADER = 1 << 16
_ALIGNMENT = 64
_REMEDY = "make it again with --save-base"


@dataclass(frozen=True)
class LogitFileHeader:
    """The header of a file. ``tokens_sha256``: of the token ids as they are in the file."""

    version: int
    model: str
    vocab_size: int
    ctx: int
    score: str
    num_windows: int
    num_scored: int
    tokens_sha256: str

    @classmethod
    def of(cls, windows: ScoringWindows, vocab_size: int, model: str) -> LogitFileHeader:
        return cls(
            VERSION,
            model,
            vocab_size,
            windows.ctx,
            windows.score,
            len(windows),
            windows.num_scored,
            tokens_sha256(windows.token_ids),
        )

    def to_bytes(self) -> bytes:
        """Return magic, size and JSON, padded so that what follows is aligned."""
        text = json.dumps(asdict(self)).encode()
        text += b" " * (-(len(MAGIC) + 4 + len(text)) % _ALIGNMENT)
        return MAGIC + struct.pack("<I", len(text)) + text

    @property
    def row_type(self) -> np.dtype[Any]:
        return np.dtype([("top", "<i4"), ("step", "<f4"), ("codes", "<u2", (self.vocab_size,))])

    @property
    def body_bytes(self) -> int:
        """Number of bytes after the header."""
        each = 4 + self.row_type.itemsize
        return 4 * self.num_windows * self.ctx + each * self.num_scored


def tokens_sha256(token_ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).hexdigest()


def encode_row(distances: np.ndarray) -> tuple[float, np.ndarray]:
    """Return step and codes, uint16 [V], of a row's distances, float32 [V], all at least 0."""
    step = min(np.float32(distances.max() / _LAST_CODE), _MAX_STEP)
    if step < np.finfo(np.float32).tiny:  # all are equal, or as good as
        return 0.0, np.zeros(len(distances), np.uint16)
    codes = np.rint(distances / step)
    return float(step), np.minimum(codes, _LAST_CODE, out=codes).astype(np.uint16)


class LogitFileWriter:
    """Writes a file row by row, in any order; it appears under its name when all rows are there.

    Raises:
        BenchmarkError: the file cannot be written, or the disk is too full.
    """

    def __init__(self, path: str | Path, windows: ScoringWindows, vocab_size: int, model: str):
        self.path = Path(path).expanduser()
        self._header = LogitFileHeader.of(windows, vocab_size, model)
        head = self._header.to_bytes()
        self._nll_at = len(head) + 4 * windows.token_ids.size
        self._rows_at = self._nll_at + 4 * windows.num_scored
        self._is_there = np.zeros(windows.num_scored, dtype=bool)
        self._new = self._create(len(head) + self._header.body_bytes)
        self._write(0, head)
        self._write(len(head), windows.token_ids.astype("<i4").tobytes())

    def take(self, scored: ScoredRow) -> None:
        row = np.empty((), self._header.row_type)
        row["top"] = scored.top
        row["step"], row["codes"] = encode_row(scored.distances)
        self._write(self._nll_at + 4 * scored.number, struct.pack("<f", scored.nll))
        self._write(self._rows_at + row.nbytes * scored.number, row.tobytes())
        self._is_there[scored.number] = True

    def finish(self) -> None:
        """Put the file in its place."""
        assert self._is_there.all(), "a scored token has no row"
        try:
            self._new.publish(sync=True)
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> LogitFileWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove a file that is not finished."""
        self._new.__exit__(*exception)

    def _create(self, size: int) -> NewFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if size > free:
                raise BenchmarkError(
                    f"{self.path} would have {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free "
                    "there: lower max_tokens, or save it elsewhere"
                )
            return NewFile(self.path)
        except OSError as error:
            raise self._failed(error) from error

    def _write(self, offset: int, content: bytes) -> None:
        try:
            self._new.file.seek(offset)
            self._new.file.write(content)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> BenchmarkError:
        return BenchmarkError(f"{self.path} cannot be written: {error.strerror or error}")


class LogitFile:
    """A logit file, checked, and mapped into memory.

    Raises:
        BenchmarkError: it cannot be read, or it is not a whole logit file of this version.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        try:
            with self.path.open("rb") as file:
                self.header, offset = self._read_header(file)
            content = np.memmap(self.path, np.uint8, mode="r", offset=0)
        except OSError as error:
            raise BenchmarkError(f"{self.path} cannot be read: {error.strerror}") from error
        header = self.header
        whole = offset + header.body_bytes
        if len(content) != whole:
            raise self._damaged(f"it has {len(content):,} bytes and should have {whole:,}")
        tokens_end = offset + 4 * header.num_windows * header.ctx
        nll_end = tokens_end + 4 * header.num_scored
        token_ids = np.array(content[offset:tokens_end]).view("<i4")
        self.windows = ScoringWindows(
            token_ids.reshape(header.num_windows, header.ctx), header.score
        )
        self.nll = np.array(content[tokens_end:nll_end]).view("<f4")
        self._rows = content[nll_end:].view(header.row_type)
        if tokens_sha256(token_ids) != header.tokens_sha256:
            raise self._damaged("its tokens are not those that it was written with")
        if not (np.isfinite(self.nll).all() and (self.nll >= 0).all()):
            raise self._damaged("a log-probability in it is none")

    def distances(self, index: int) -> tuple[int, np.ndarray]:
        """Return, of scored token ``index``, the most probable token, and all tokens' distances
        from it, float64 [V]."""
        row = self._rows[index]
        top, step = int(row["top"]), float(row["step"])
        if not (0 <= top < self.header.vocab_size and 0 <= step <= _MAX_STEP):
            raise self._damaged(f"row {index} of it cannot be")
        return top, np.multiply(row["codes"], step, dtype=np.float64)

    def check_fits(self, windows: ScoringWindows, vocab_size: int) -> None:
        """Raise BenchmarkError unless the file is of the same windows and vocabulary."""
        header = self.header
        if header.vocab_size != vocab_size:
            raise BenchmarkError(
                f"{self.path} is of a model with {header.vocab_size:,} tokens ({header.model}), "
                f"this one has {vocab_size:,}: only models with one vocabulary can be compared"
            )
        for name, theirs, ours in (
            ("ctx", header.ctx, windows.ctx),
            ("score", header.score, windows.score),
            ("windows", header.num_windows, len(windows)),
        ):
            if theirs != ours:
                raise BenchmarkError(
                    f"{self.path} was made with {name} {theirs}, this run has {ours}: "
                    "leave out --ctx, --score and --max-tokens, which are then the file's, "
                    "and give the same text"
                )
        if header.tokens_sha256 != tokens_sha256(windows.token_ids):
            where = int(np.argmax((self.windows.token_ids != windows.token_ids).ravel()))
            raise BenchmarkError(
                f"{self.path} was made from other tokens, from number {where:,} on: give the text "
                "that it was made from, and a model with the same tokenizer"
            )

    def _read_header(self, file: BinaryIO) -> tuple[LogitFileHeader, int]:
        """Return the header, and the offset of what follows."""
        start = file.read(len(MAGIC) + 4)
        if not start.startswith(MAGIC):
            raise BenchmarkError(f"{self.path} is no logit file of octavo: {_REMEDY}")
        size = int.from_bytes(start[len(MAGIC) :], "little")
        text = file.read(min(size, _MAX_HEADER))
        if len(start) < len(MAGIC) + 4 or len(text) != size:
            raise self._damaged("it ends within its header")
        try:
            values = json.loads(text)
        except ValueError as error:
            raise self._damaged("its header is not JSON") from error
        if isinstance(values, dict) and values.get("version") != VERSION:
            raise BenchmarkError(
                f"{self.path} has version {values.get('version')!r} of the format, "
                f"this octavo reads {VERSION}: {_REMEDY}"
            )
        return self._checked(values), len(start) + size

    def _checked(self, values: Any) -> LogitFileHeader:
        """Return the header if every field is there, of its type, and consistent with others."""
        names = [field.name for field in fields(LogitFileHeader)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise self._damaged("its header does not have the fields that it should")
        texts = ("model", "score", "tokens_sha256")
        for name in names:
            if type(values[name]) is not (str if name in texts else int):
                raise self._damaged(f"{name} of its header is of the wrong type")
        header = LogitFileHeader(**values)
        numbers = (header.vocab_size, header.ctx, header.num_windows, header.num_scored)
        if header.score not in SCORES or min(numbers) < 1 or max(numbers) >= 1 << 31:
            raise self._damaged("a value of its header is out of range")
        shape = ScoringWindows(np.empty((0, header.ctx), np.int32), header.score)
        if header.num_scored != header.num_windows * shape.num_scored_each:
            raise self._damaged("the counts of its header contradict each other")
        return header

    def _damaged(self, what: str) -> BenchmarkError:
        return BenchmarkError(f"{self.path} is damaged: {what}: {_REMEDY}")
