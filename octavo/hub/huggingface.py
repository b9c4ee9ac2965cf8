"""Fetch models from the Hugging Face hub by ids such as ``org/name@revision:file.gguf``, or
``org/name:Q4_K_M``, which is the GGUF file of that quantization.

Only weights, configuration, tokenizer and templates are fetched; never code, never pickles. Of a
GGUF file that was split, any part stands for all of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
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
    r"(?::(?:(?P<file>[A-Za-z0-9][\w ./+-]*\.gguf)|(?P<tag>[A-Za-z0-9_-]{1,32})))?",
    re.ASCII,
)


# The part of a file's name that says its quantization: Q4_K_M, IQ4_XS, UD-Q4_K_XL, bf16.
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32))"
    r"(?=$|[-.])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub. ``file`` is one of its GGUF files, ``tag`` the quantization of one."""

    repo: str
    revision: str | None = None
    file: str | None = None
    tag: str | None = None

    @property
    def is_gguf(self) -> bool:
        return self.file is not None or self.tag is not None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """Return the parts of ``org/name[@revision][:file.gguf or :TAG]``, None for text of another
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
    entry = files[0].path if hub_id.is_gguf else "."
    return Fetched(entry, files, info.sha, license)


def _choose(hub_id: HubId, siblings: dict[str, Any]) -> list[Any]:
    """Return the files of the repository to fetch; of a split GGUF file all parts, in order."""
    file = hub_id.file if hub_id.tag is None else _file_of_tag(hub_id, hub_id.tag, siblings)
    if file is not None:
        if file not in siblings:
            raise ModelNotFoundError(
                f"{hub_id.repo} has no file {file!r}. " + _gguf_hint(hub_id, siblings)
            )
        parts = split_parts(file)
        missing = [part for part in parts if part not in siblings]
        if missing:
            raise ModelNotFoundError(
                f"{hub_id.repo}: {file} is one of {len(parts)} parts, and the repository "
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


def _file_of_tag(hub_id: HubId, tag: str, names: Iterable[str]) -> str:
    """Return the GGUF file of a quantization: the first part of one that was split. Of several, the
    one that is not in a folder, or has the shortest name.

    Raises:
        ModelNotFoundError: there is none.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".gguf") and split_parts(name)[0] == name:
            for each in tags_of(name):
                found.setdefault(each, []).append(name)
    chosen = found.get(tag.upper())
    if chosen is None:
        near = difflib.get_close_matches(tag.upper(), found, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(found)}"
        raise ModelNotFoundError(
            f"{hub_id.repo} has no GGUF file of {tag}; {hint if found else 'it has none at all'}"
        )
    return min(chosen, key=lambda name: (name.count("/"), len(name), name))


def tags_of(name: str) -> list[str]:
    """Return the quantizations that a GGUF file's name says it has, in capitals: none, or one."""
    stem = name.rpartition("/")[2].removesuffix(".gguf")
    found = _QUANTIZATION.findall(stem)
    return [found[-1].upper()] if found else []


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
