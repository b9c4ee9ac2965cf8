"""`ServedModels`, the models as Ollama's clients see them."""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.base.errors import ChatTemplateError, ModelError
from octavo.core.limits import context_tokens
from octavo.server.api.fill_in import FillInTokens
from octavo.server.api.ollama.answers import timestamp
from octavo.server.api.server_context import ModelStatus, ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.errors import HttpError

LATEST = ":latest"  # the tag that Ollama's clients add to names without one
_UNKNOWN = "unknown"
_NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded that stays


class ServedModels:
    """The models of a server: the one that it runs, under its names, or several."""

    def __init__(self, server: ServerContext):
        self._server = server

    def find(self, name: str) -> str:
        """Return the server's name of a model.

        Raises:
            HttpError: 404, it is not served.
        """
        for known in (name, name.removesuffix(LATEST)):
            try:
                self._server.check_model(known)
            except HttpError:
                continue
            return known
        raise HttpError(404, f"model {name[:200]!r} not found; there is {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        return self._server.model_names

    async def tags(self) -> list[dict[str, Any]]:
        """Return all models."""
        several = self._server.models
        if several is None:
            return await LoadedModel(self._server).entries()
        found: list[dict[str, Any]] = []
        for status in several.list():
            context = several.context_of(status.names[0])
            found += (
                await _entries_of_files(status, self._server.created)
                if context is None
                else await LoadedModel(context).entries()
            )
        return found

    async def running(self) -> list[dict[str, Any]]:
        """Return the models in memory."""
        several = self._server.models
        if several is None:
            return await LoadedModel(self._server).running_entries(None)
        found: list[dict[str, Any]] = []
        for status in several.list():
            context = several.context_of(status.names[0])
            if context is not None:
                found += await LoadedModel(context).running_entries(status.unload_after)
        return found

    async def show(self, name: str) -> dict[str, Any]:
        """Return the description of one."""
        self.find(name)
        return await LoadedModel(self._server).description()


class LoadedModel:
    """A model that an engine runs, as Ollama describes it.

    Args:
        server: what routes work with of this model.
    """

    def __init__(self, server: ServerContext):
        self._server = server

    async def entries(self) -> list[dict[str, Any]]:
        """Return the entry of each of its names."""
        family = await self._family()
        names = self._server.model_names
        return [self._one_entry(name, family) for name in names]

    async def running_entries(self, unload_after: float | None) -> list[dict[str, Any]]:
        """Return the same with what it takes, and when it is unloaded: in so many seconds."""
        facts = self._server.engine.facts
        on_gpu = str(facts.info.get("device", "cpu")) != "cpu"
        more = {
            "expires_at": _NEVER if unload_after is None else timestamp(time.time() + unload_after),
            "size_vram": self._size if on_gpu else 0,
            "context_length": context_tokens(facts.max_model_len, facts.num_slots),
        }
        return [{**entry, **more} for entry in await self.entries()]

    async def description(self) -> dict[str, Any]:
        """Return all that there is to know of it."""
        server, family = self._server, await self._family()
        capabilities = ["completion"]
        try:
            template = await server.prompts.template_source()
            capabilities.append("tools")
            if await server.prompts.has_thoughts():
                capabilities.append("thinking")
        except ChatTemplateError:
            template = ""
        if FillInTokens.of(server.prompts.tokenizer) is not None:
            capabilities.append("insert")
        return {
            "modelfile": f"FROM {server.model_names[0]}\n",
            "parameters": self._parameters,
            "template": template,
            "license": "",
            "details": self._model_details(family),
            "model_info": self._info(family),
            "capabilities": capabilities,
            "modified_at": timestamp(server.created),
        }

    def _one_entry(self, name: str, family: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": timestamp(self._server.created),
            "size": self._size,
            "digest": self._digest,
            "details": self._model_details(family),
        }

    @property
    def _size(self) -> int:
        return int(self._server.engine.facts.info.get("weights_bytes") or 0)

    @property
    def _digest(self) -> str:
        """A name of what the engine runs, which changes with it."""
        facts = self._server.engine.facts
        name, dtype = self._server.model_names[0], facts.info.get("dtype")
        known = repr((name, sorted(facts.rank_model.items()), dtype))
        return hashlib.sha256(known.encode()).hexdigest()

    def _model_details(self, family: str) -> dict[str, Any]:
        dtype = str(self._server.engine.facts.info.get("dtype") or "")
        return _model_details(self._server.model_path, family, _shortened(self._num_params), dtype)

    @property
    def _num_params(self) -> int:
        """Number of parameters in matrices; of several ranks, those of one."""
        matrices = self._server.engine.facts.rank_model.get("matrices") or ()
        return sum(int(matrix["count"] * matrix["num_params"]) for matrix in matrices)

    async def _family(self) -> str:
        """Return the kind of model, as its files have it."""
        return await in_background(_family_of, self._server.model_path)

    @property
    def _parameters(self) -> str:
        """The sampling that the model's authors recommend, as lines of a Modelfile."""
        defaults = self._server.engine.facts.sampling_defaults
        names = {"repetition_penalty": "repeat_penalty"}
        return "\n".join(f"{names.get(name, name)} {value}" for name, value in defaults.items())

    def _info(self, family: str) -> dict[str, Any]:
        facts = self._server.engine.facts
        return {
            "general.architecture": family,
            "general.basename": self._server.model_names[0],
            "general.parameter_count": self._num_params,
            f"{family}.context_length": facts.max_model_len,
            f"{family}.vocab_size": facts.vocab_size,
            f"{family}.block_count": facts.rank_model.get("num_layers"),
            f"{family}.embedding_length": facts.rank_model.get("hidden_size"),
        }


async def _entries_of_files(status: ModelStatus, created: int) -> list[dict[str, Any]]:
    """Return the entry of each name of a model that is not loaded, of which its files tell."""
    digest = hashlib.sha256(repr(status.names).encode()).hexdigest()
    family = await in_background(_family_of, status.path)
    return [
        {
            "name": name,
            "model": name,
            "modified_at": timestamp(created),
            "size": (status.memory_bytes or {}).get("weights", 0),
            "digest": digest,
            "details": _model_details(status.path, family, "", ""),
        }
        for name in status.names
    ]


def _model_details(path: Path | None, family: str, size: str, dtype: str) -> dict[str, Any]:
    is_gguf = path is not None and path.suffix == ".gguf"
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": dtype,
    }


@lru_cache(maxsize=64)
def _family_of(path: Path | None) -> str:
    from octavo.base.model_files import ModelFolder
    from octavo.models.gguf import GGUFFile

    try:
        if path is not None and path.is_file():
            with GGUFFile(path) as file:
                return str(file.metadata.get("general.architecture", _UNKNOWN))
        config = None if path is None else ModelFolder(path).read_json("config.json")
    except ModelError:
        return _UNKNOWN
    return str((config or {}).get("model_type", _UNKNOWN))


def _shortened(number: int) -> str:
    """Return a number of parameters as people write it."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
