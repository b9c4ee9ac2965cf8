"""`ServedModels`, the models as Ollama's clients see them."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

from octavo.base.errors import ChatTemplateError, OctavoError
from octavo.core.limits import context_tokens
from octavo.server.api.fill_in import FillInTokens
from octavo.server.api.ollama.answers import timestamp
from octavo.server.api.sampling import to_sampling_params
from octavo.server.api.requests import GenerationFields
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.errors import HttpError

LATEST = ":latest"  # the tag that Ollama's clients add to names without one
_NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded that stays


class ServedModels:
    """The models of a server: the one that it runs, under its names."""

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

    def tags(self) -> list[dict[str, Any]]:
        """Return all models."""
        return [self._entry(name) for name in self.names]

    def running(self) -> list[dict[str, Any]]:
        """Return the models in memory."""
        facts = self._server.engine.facts
        on_gpu = str(facts.info.get("device", "cpu")) != "cpu"
        more = {
            "expires_at": _NEVER,
            "size_vram": self._size if on_gpu else 0,
            "context_length": context_tokens(facts.max_model_len, facts.num_slots),
        }
        return [{**entry, **more} for entry in self.tags()]

    async def show(self, name: str) -> dict[str, Any]:
        """Return the description of one."""
        self.find(name)
        server = self._server
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
            "modelfile": f"FROM {self.names[0]}\n",
            "parameters": self._parameters,
            "template": template,
            "license": "",
            "details": self._details,
            "model_info": await in_background(self._info),
            "capabilities": capabilities,
            "modified_at": timestamp(server.created),
        }

    # -- what is known of it -----------------------------------------------------------------------

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": timestamp(self._server.created),
            "size": self._size,
            "digest": self._digest,
            "details": self._details,
        }

    @property
    def _size(self) -> int:
        return int(self._server.engine.facts.info.get("weights_bytes") or 0)

    @cached_property
    def _digest(self) -> str:
        """A name of what the engine runs, which changes with it."""
        facts = self._server.engine.facts
        known = repr((self.names[0], sorted(facts.rank_model.items()), facts.info.get("dtype")))
        return hashlib.sha256(known.encode()).hexdigest()

    @property
    def _details(self) -> dict[str, Any]:
        family = str(self._spec_family)
        path = self._server.model_path
        is_gguf = path is not None and path.suffix == ".gguf"
        return {
            "parent_model": "",
            "format": "gguf" if is_gguf else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": _shortened(self._num_params),
            "quantization_level": str(self._server.engine.facts.info.get("dtype") or ""),
        }

    @cached_property
    def _spec(self) -> Any:
        """The shape of the model, None where it cannot be told."""
        from octavo.cost.open_spec import open_spec

        path = self._server.model_path
        try:
            return None if path is None else open_spec(path)
        except OctavoError:
            return None

    @property
    def _spec_family(self) -> str:
        return "unknown" if self._spec is None else self._spec.name

    @property
    def _num_params(self) -> int:
        return 0 if self._spec is None else self._spec.num_params

    @property
    def _parameters(self) -> str:
        """The sampling that the model's authors recommend, as lines of a Modelfile."""
        defaults = self._server.engine.facts.sampling_defaults
        names = {"repetition_penalty": "repeat_penalty"}
        return "\n".join(f"{names.get(name, name)} {value}" for name, value in defaults.items())

    def _info(self) -> dict[str, Any]:
        family, facts = self._spec_family, self._server.engine.facts
        info: dict[str, Any] = {
            "general.architecture": family,
            "general.basename": self.names[0],
            "general.parameter_count": self._num_params,
            f"{family}.context_length": facts.max_model_len,
            f"{family}.vocab_size": facts.vocab_size,
        }
        if self._spec is not None:
            info[f"{family}.block_count"] = self._spec.num_layers
            info[f"{family}.embedding_length"] = self._spec.hidden_size
        return info


def _shortened(number: int) -> str:
    """Return a number of parameters as people write it."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
