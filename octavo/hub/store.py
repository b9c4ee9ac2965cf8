"""The folder in which fetched models are kept, and its bookkeeping.

    $OCTAVO_HOME (or ~/.cache/octavo)
    ├── models/<key>/          a whole model; manifest.json describes it
    ├── staging/<key>/         a download under way; renamed to models/<key> when it is complete
    └── locks/<key>.lock       held by the process that writes <key>

A model appears in ``models`` by one rename, so it is there entirely or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from octavo.base.files import lock as lock_file
from octavo.base.files import sha256_of, sync
from octavo.base.model_files import split_parts

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a stored model. ``path`` is relative to the model's folder."""

    path: str
    num_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model in the store.

    ``name`` is an alias or a hub id, ``path`` the ``.gguf`` file or folder that a loader opens, and
    ``fetched`` a UTC time in ISO 8601.
    """

    name: str
    path: Path
    folder: Path
    license: str | None
    source: str
    fetched: str
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def home() -> Path:
    """Return ``$OCTAVO_HOME``, or ``~/.cache/octavo``. It may not exist yet."""
    return Path(os.environ.get("OCTAVO_HOME") or "~/.cache/octavo").expanduser().absolute()


def key_of(name: str) -> str:
    """Return the folder name of a model: readable, of safe characters only, and unambiguous.

    A name that is changed by the clean-up gets a piece of its hash, so that two names never share
    a folder, and no name can point outside of the store.
    """
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)
    if safe == name and name:
        return name
    return f"{safe[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def model_folder(name: str) -> Path:
    return home() / "models" / key_of(name)


def staging_folder(name: str) -> Path:
    return home() / "staging" / key_of(name)


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the lock for writing ``name``; waits while another process has it."""
    path = home() / "locks" / f"{key_of(name)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as handle:
        try:
            lock_file(handle.fileno())
        except BlockingIOError:
            log.warning("another process is fetching %s: waiting for it", name)
            lock_file(handle.fileno(), wait=True)
        except OSError as error:
            if error.errno != errno.ENOLCK:
                raise
            log.info("%s is fetched without a lock: %s", name, error)
        yield


def find(name: str) -> InstalledModel | None:
    """Return the stored model called ``name``, or None. Sizes are checked, contents are not."""
    model = read_manifest(model_folder(name))
    return model if model is not None and model.name == name else None


def installed() -> list[InstalledModel]:
    """Return every complete model in the store, by name."""
    folders = (home() / "models").glob("*/")
    models = [model for model in map(read_manifest, folders) if model is not None]
    return sorted(models, key=lambda model: model.name)


def publish(
    folder: Path,
    name: str,
    *,
    entry: str,
    files: tuple[StoredFile, ...],
    license: str | None,
    source: str,
) -> InstalledModel:
    """Move a complete ``folder`` into the store as ``name``. The caller holds the lock.

    ``entry`` is the path that a loader opens, relative to the folder ("." for the folder itself).
    """
    manifest = {
        "name": name,
        "entry": entry,
        "license": license,
        "source": source,
        "fetched": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": [asdict(file) for file in files],
    }
    with open(folder / MANIFEST, "w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    target = model_folder(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_tree(target)
    os.replace(folder, target)
    sync(target.parent)
    model = find(name)
    assert model is not None, f"{target} was published, yet it is not whole"
    return model


def remove(name: str) -> int:
    """Delete a model and what an interrupted download left of it. Return the bytes freed."""
    with lock(name):
        freed = sum(map(tree_bytes, (model_folder(name), staging_folder(name))))
        _remove_tree(model_folder(name))
        _remove_tree(staging_folder(name))
    return freed


def damaged_files(model: InstalledModel) -> list[str]:
    """Read the whole model again; return the paths whose sha256 has changed since it was
    fetched."""
    return [
        file.path
        for file in model.files
        if file.sha256 is not None and sha256_of(model.folder / file.path) != file.sha256
    ]


def tree_bytes(folder: Path) -> int:
    """Return the bytes of all files below ``folder``. Files may come and go meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def read_manifest(folder: Path) -> InstalledModel | None:
    """Return the model in a folder, None if it is missing or incomplete, or its manifest is
    damaged."""
    try:
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = tuple(
            StoredFile(_inner_path(file["path"]), int(file["num_bytes"]), file["sha256"])
            for file in raw["files"]
        )
        if any((folder / f.path).stat().st_size != f.num_bytes for f in files):
            return None
        entry = _inner_path(raw["entry"])
        if entry.endswith(".gguf") and not {f.path for f in files}.issuperset(split_parts(entry)):
            return None
        return InstalledModel(
            name=str(raw["name"]),
            path=folder / entry,
            folder=folder,
            license=raw["license"],
            source=str(raw["source"]),
            fetched=str(raw["fetched"]),
            files=files,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _inner_path(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"{path!r} points out of the model's folder")
    return path


def _remove_tree(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
