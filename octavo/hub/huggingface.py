"""Fetch models from the Hugging Face hub by ids such as ``org/name@revision:file.gguf``.

Only weights, configuration, tokenizer and templates are fetched; never code, never pickles. Of a
GGUF file that was split, any part stands for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from octavo.base.errors import DownloadError, ModelNotFoundError, OctavoError, UnsupportedModelError
from octavo.base.files import sha256_of
from octavo.base.model_files import split_parts
from octavo.hub.store import StoredFile, tree_bytes
from octavo.hub.watch import watch

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*", "NOTICE*")

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?"
    r"(?::(?P<file>[A-Za-z0-9][\w ./+-]*\.gguf))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubId:
    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """Return the parts of ``org/name[@revision][:file.gguf]``, None for text of another
        form."""
        match = _HUB_ID.fullmatch(text)
        if match is None or ".." in text:
            return None
        return cls(**match.groupdict())


@dataclass(frozen=True, slots=True)
class Fetched:
    """A download: the path within its folder that a loader opens, the files, the exact commit."""

    entry: str
    files: tuple[StoredFile, ...]
    commit: str
    license: str | None


def fetch(
    hub_id: HubId, folder: Path, progress: Callable[[int, int | None], None] | None
) -> Fetched:
    """Download into ``folder``, continuing an earlier try; check sizes and sha256.

    Raises ModelNotFoundError (no such repository, revision or file), UnsupportedModelError (no
    weights that octavo reads), DownloadError (everything else).
    """
    import huggingface_hub

    with _hub_errors(hub_id):
        info = huggingface_hub.HfApi().model_info(
            hub_id.repo, revision=hub_id.revision, files_metadata=True
        )
    if info.sha is None:
        raise DownloadError(f"the hub names no commit for {hub_id.repo}: try again")
    chosen = _choose(hub_id, {file.rfilename: file for file in info.siblings or ()})
    total = sum(file.size or 0 for file in chosen)
    with (
        _hub_errors(hub_id),
        _without_bars(),
        watch(lambda: tree_bytes(folder), total, progress),
    ):
        huggingface_hub.snapshot_download(
            hub_id.repo,
            revision=info.sha,
            local_dir=folder,
            allow_patterns=[file.rfilename for file in chosen],
        )
    files = tuple(_check(hub_id, folder, file) for file in chosen)
    if progress is not None:
        progress(total, total)
    license = getattr(getattr(info, "card_data", None), "license", None)
    entry = "." if hub_id.file is None else files[0].path
    return Fetched(entry, files, info.sha, license)


def _choose(hub_id: HubId, siblings: dict[str, Any]) -> list[Any]:
    """Return the files of the repository to fetch; of a split GGUF file all parts, in order."""
    if hub_id.file is not None:
        if hub_id.file not in siblings:
            raise ModelNotFoundError(
                f"{hub_id.repo} has no file {hub_id.file!r}. " + _gguf_hint(hub_id, siblings)
            )
        parts = split_parts(hub_id.file)
        missing = [part for part in parts if part not in siblings]
        if missing:
            raise ModelNotFoundError(
                f"{hub_id.repo}: {hub_id.file} is one of {len(parts)} parts, and the repository "
                f"does not have {', '.join(missing[:5])}"
            )
        return [siblings[part] for part in parts]
    names = [n for n in siblings if "/" not in n and any(fnmatch(n, p) for p in PATTERNS)]
    weights = [n for n in names if n.endswith(".safetensors")]
    if not weights:
        raise UnsupportedModelError(
            f"{hub_id.repo} has no .safetensors weights. {_gguf_hint(hub_id, siblings)} Pickled "
            f"weights (.bin, .pt) are refused: convert them with safetensors' own converter"
        )
    # Some repositories hold the weights twice, the second time in the maker's own layout.
    if any(not n.startswith("consolidated") for n in weights):
        names = [n for n in names if not n.startswith("consolidated")]
    return [siblings[name] for name in sorted(names)]


def _gguf_hint(hub_id: HubId, siblings: dict[str, Any]) -> str:
    files = sorted(name for name in siblings if name.endswith(".gguf"))
    if not files:
        return "It has no .gguf files either."
    shown = ", ".join(files[:8]) + (", …" if len(files) > 8 else "")
    return f"Choose a GGUF file as {hub_id.repo}:FILE, of: {shown}."


def _check(hub_id: HubId, folder: Path, file: Any) -> StoredFile:
    path = folder / file.rfilename
    assert ".." not in PurePosixPath(file.rfilename).parts
    num_bytes = path.stat().st_size if path.is_file() else None
    if num_bytes is None or (file.size is not None and num_bytes != file.size):
        raise DownloadError(
            f"{hub_id.repo}: {file.rfilename} has {num_bytes} bytes instead of {file.size}. "
            f"Try again"
        )
    actual = sha256_of(path)
    expected = getattr(file.lfs, "sha256", None)
    if expected is not None and actual != expected:
        path.unlink()
        raise DownloadError(
            f"{hub_id.repo}: checksum mismatch in {file.rfilename}: expected sha256 {expected}, "
            f"got {actual}. The file was deleted; try again"
        )
    return StoredFile(file.rfilename, num_bytes, actual)


@contextmanager
def _hub_errors(hub_id: HubId) -> Iterator[None]:
    """Convert the hub client's errors to octavo's, which say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except OctavoError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{hub_id.repo} is gated: accept its terms at https://huggingface.co/{hub_id.repo}, "
            f"then run `hf auth login` (or set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{hub_id.repo} has no revision {hub_id.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no model {hub_id.repo!r} (or it is private: run `hf auth login`)"
        ) from error
    except Exception as error:  # the hub client passes on whatever its HTTP library raises
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DownloadError(
            f"could not fetch {hub_id.repo} from the Hugging Face hub: {reason}. Check the "
            f"network connection; what has been fetched already is kept for the next try"
        ) from error


@contextmanager
def _without_bars() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()
