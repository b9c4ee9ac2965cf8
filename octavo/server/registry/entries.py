"""`ModelEntry`, a model that a server may load, and the folder in which it finds some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.base.errors import ConfigError
from octavo.base.model_files import ENGINE_MANIFEST, begins_as_gguf, split_parts
from octavo.hub.store import MANIFEST, read_manifest
from octavo.settings.engine import EngineArgs

_MOST_FOUND = 1024  # models of a folder


@dataclass(frozen=True)
class ModelEntry:
    """A model by its names.

    Args:
        names: that clients may use; answers have the first.
        argument: as the operator wrote it, a valid name that is not shown; None of a folder's.
        path: of its files.
        args: of its engine.
        is_pinned: it is not unloaded but on request.
        loads_at_start: it is loaded when the server starts, if there is room.
    """

    names: tuple[str, ...]
    path: Path
    args: EngineArgs
    argument: str | None = None
    chat_template: str | None = None
    is_pinned: bool = False
    loads_at_start: bool = False

    def serves(self, name: str) -> bool:
        """Return whether a name is one of this model's."""
        return name == self.argument or name in self.names


def check_names(entries: Iterable[ModelEntry]) -> None:
    """Raise ConfigError if two models have the same name."""
    taken: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in entry.names:
            if (other := taken.setdefault(name, entry)) is not entry:
                raise ConfigError(
                    f"{other.path} and {entry.path} are both called {name}: give one of them a "
                    "name of its own, in the file of --config (models: [{model: …, name: …}])"
                )


def models_in(folder: Path) -> Sequence[tuple[str, Path]]:
    """Return the models of a folder by their names: GGUF files (of a split one the first part),
    folders with a config.json, and what `octavo pull` keeps.

    Raises:
        ConfigError: it cannot be read.
    """
    found: dict[str, Path] = {}
    try:
        for path in sorted(folder.iterdir()):
            if (named := _model_at(path)) is not None and len(found) < _MOST_FOUND:
                found.setdefault(*named)
    except OSError as error:
        raise ConfigError(f"model_dir {folder}: {error.strerror or error}") from None
    return list(found.items())


def _model_at(path: Path) -> tuple[str, Path] | None:
    """Return the name and the path of a model that a folder's entry is; None if it is none."""
    if path.is_dir():
        if (path / MANIFEST).is_file():
            stored = read_manifest(path)
            return None if stored is None else (stored.name, stored.path)
        is_model = any((path / name).is_file() for name in ("config.json", ENGINE_MANIFEST))
        return (path.name, path) if is_model else None
    if path.suffix != ".gguf" or not begins_as_gguf(path):
        return None
    first = split_parts(path.name)[0]
    if path.name != first:
        return None
    name = path.name.removesuffix(".gguf")
    return name.rpartition("-00001-of-")[0] or name, path
