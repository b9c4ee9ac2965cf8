"""The adapters of a server by their names, which clients give as ``model``.

The server knows names, folders and digests; engines read the weights when a request needs them, by
the path and the digest that come with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError, InvalidRequestError
from octavo.lora.request import LoRARequest, ServedLora

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.server.engine.generation import EngineFacts


class ServedLoras:
    """The names of adapters. ``find`` and ``all`` are for the event loop; the others read files,
    and are for threads.

    Args:
        model_path: of the model that adapters are for.
        taken: names that no adapter may have: the model's.
        named: adapters to have from the start.
    """

    def __init__(
        self, model_path: Path | None, taken: Sequence[str], named: Sequence[LoRARequest] = ()
    ):
        self._model_path = model_path
        self._taken = frozenset(taken)
        self._named = named
        self._lock = threading.Lock()
        self._served: dict[str, ServedLora] = {}
        self._next_number = len(named) + 1
        self._config: ModelConfig | None = None
        for each in named:
            if each.lora_name in self._taken:
                raise ConfigError(f"lora: {each.lora_name!r} is the name of the model itself")

    def find(self, name: str | None) -> ServedLora | None:
        return None if name is None else self._served.get(name)

    def all(self) -> list[ServedLora]:
        """Return all adapters, in the order in which they came."""
        return list(self._served.values())

    def read_named(self) -> None:
        """Take in the adapters of the start. ModelError if one is missing."""
        from octavo.lora.peft_folder import digest_of

        for each in self._named:
            self._served[each.lora_name] = ServedLora(each, digest_of(each.lora_path))

    def check_named(self, facts: EngineFacts) -> None:
        """Check the adapters of the start against the model, once an engine is there.

        Raises:
            ModelError: one is damaged, of another model, or exceeds a limit.
        """
        for each in self._named:
            self._check(each.lora_path, facts)

    def load(self, name: str, path: str, facts: EngineFacts, *, replaces: bool = False) -> None:
        """Take in an adapter, after all of it has been read and checked.

        Args:
            replaces: it may take the place of one with this name.

        Raises:
            InvalidRequestError: the name is taken, or engines have no adapters.
            ModelError: it cannot be read, is of another model, or exceeds a limit.
        """
        from octavo.lora.peft_folder import digest_of

        if facts.lora_shapes is None:
            raise InvalidRequestError(f"cannot be loaded: {facts.why_no_loras}", "lora_path")
        self._check_name(name, replaces=replaces)
        digest = digest_of(path)
        self._check(path, facts)
        with self._lock:
            self._check_name(name, replaces=replaces)
            request = LoRARequest(name, self._next_number, path)
            self._next_number += 1
            self._served[name] = ServedLora(request, digest)

    def unload(self, name: str) -> bool:
        """Forget an adapter; requests that have it go on. Returns False if there is none."""
        with self._lock:
            return self._served.pop(name, None) is not None

    def _check_name(self, name: str, *, replaces: bool) -> None:
        if name in self._taken:
            raise InvalidRequestError(f"{name!r:.200} is the name of the model", "lora_name")
        if name in self._served and not replaces:
            raise InvalidRequestError(
                f"{name!r:.200} is loaded already: unload it first, or set load_inplace",
                "lora_name",
            )

    def _check(self, path: str, facts: EngineFacts) -> None:
        """Raise what an engine would, when it first needs the adapter."""
        from octavo.lora.limits import check_rank
        from octavo.lora.peft_folder import PeftFolder
        from octavo.lora.targets import AdaptableModel, changes_of

        assert facts.lora_shapes is not None
        config, is_gguf = self._config_of_model()
        model = AdaptableModel(config, facts.lora_shapes, is_gguf)
        changes = changes_of(PeftFolder(path), model)
        for name, change in changes.items():
            check_rank(path, name, change.rank, facts.max_lora_rank)

    def _config_of_model(self) -> tuple[ModelConfig, bool]:
        from octavo.base.model_files import begins_as_gguf
        from octavo.models.checkpoint import open_checkpoint

        assert self._model_path is not None
        if self._config is None:
            self._config = open_checkpoint(self._model_path).config()
        return self._config, self._model_path.is_file() and begins_as_gguf(self._model_path)
