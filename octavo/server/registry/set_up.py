"""`RegistrySetUp`, which makes a registry of what an operator has asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from octavo import hub
from octavo.base.errors import ConfigError
from octavo.server.api.server_context import ANY_NAME
from octavo.server.engine.process import ProcessLauncher
from octavo.server.engine.replica_launchers import num_gpus
from octavo.server.http.access_control import DrainState
from octavo.server.registry.entries import ModelEntry, check_names, models_in
from octavo.server.registry.memory_need import PlannedModel, plan_model
from octavo.server.registry.model_registry import ModelRegistry, RegistrySettings
from octavo.server.registry.several_models import SeveralModels
from octavo.server.requested_model import RequestedModel
from octavo.server.served_model import ServerCommons, model_name
from octavo.server.settings import ServerSettings
from octavo.settings.engine import EngineArgs, parse_bytes
from octavo.sources.open import open_source
from octavo.system import machine

# Where models have no KV memory of their own, each may take an equal part of all memory: of so
# many parts at the most.
_MOST_PARTS = 4
MAX_WAITING = 1024  # requests for models that are not loaded, where no other number is given


class RegistrySetUp:
    """Finds the models, and makes the registry.

    Raises:
        ConfigError, ModelError: there are none, two have the same name, or one cannot be found; a
            setting does not go with several models.
    """

    def __init__(
        self,
        models: Sequence[RequestedModel],
        others: Callable[[str], EngineArgs],
        settings: ServerSettings,
        find_calibration: Callable[[str], Any],
    ):
        self._settings = settings
        self._others = others
        self._find_calibration = find_calibration
        _check_settings(models, settings)
        self._named = [self._entry_of(model, settings) for model in models]
        self._entries = self._find_entries()
        if not self._entries:
            raise ConfigError(
                f"model_dir {settings.model_dir} has no models: GGUF files, or folders"
            )
        self._check_pins()
        self._budget = _budget(settings, [entry.args for entry in self._entries])

    def create(self) -> tuple[DrainState, SeveralModels]:
        """Return what the server serves, and the state of its shutdown."""
        settings = self._settings
        registry_settings = RegistrySettings(
            budget_bytes=self._budget,
            max_waiting=self._entries[0].args.max_queued_requests or MAX_WAITING,
            idle_seconds=settings.idle_unload,
            plan=self._plan,
            create_launcher=partial(ProcessLauncher, log_format=settings.log_format),
            find_entries=self._find_entries,
            find_calibration=self._find_calibration,
        )
        commons = partial(ServerCommons.create, settings)
        registry = ModelRegistry(self._entries, registry_settings, commons)
        return registry.commons.drain_state, SeveralModels(registry)

    def _plan(self, entry: ModelEntry) -> PlannedModel:
        args = open_source(entry.path, entry.args.model_impl).settings(entry.args)
        part = self._budget // min(len(self._entries), _MOST_PARTS)
        return plan_model(args, entry.path, part=part, budget=self._budget)

    def _find_entries(self) -> list[ModelEntry]:
        """Return the models that were named, and those that the folder has now."""
        entries = list(self._named)
        if self._settings.model_dir is not None:
            taken = {name for entry in entries for name in entry.names}
            entries += [
                ModelEntry(
                    (name,),
                    path,
                    self._others(str(path)),
                    chat_template=self._settings.chat_template,
                    is_pinned=name in self._settings.pin,
                )
                for name, path in models_in(Path(self._settings.model_dir).expanduser())
                if name not in taken
            ]
        check_names(entries)
        return entries

    def _entry_of(self, model: RequestedModel, settings: ServerSettings) -> ModelEntry:
        argument = model.args.model
        names = model.names or settings.served_model_name or (model_name(argument),)
        return ModelEntry(
            names,
            hub.resolve(argument),
            model.args,
            argument=None if model.names or settings.served_model_name else argument,
            chat_template=model.chat_template or settings.chat_template,
            is_pinned=model.is_pinned or bool({argument, *names}.intersection(settings.pin)),
            loads_at_start=model.loads_at_start,
        )

    def _check_pins(self) -> None:
        for name in self._settings.pin:
            if not any(entry.serves(name) for entry in self._entries):
                names = ", ".join(entry.names[0] for entry in self._entries)
                raise ConfigError(f"pin {name}: there is no such model among {names}")


def _check_settings(models: Sequence[RequestedModel], settings: ServerSettings) -> None:
    """Raise ConfigError for a setting that several models cannot have."""
    if ANY_NAME in settings.served_model_name:
        raise ConfigError(
            "served_model_name * accepts any name, and here the name says which model is meant: "
            "leave it out"
        )
    if settings.served_model_name and (len(models) != 1 or settings.model_dir is not None):
        raise ConfigError(
            "served_model_name is for one model: name several in the file of --config "
            "(models: [{model: …, name: …}])"
        )
    for name in ("router", "max_local_prefill_length", "target_ttft", "scale_down_after"):
        if getattr(settings, name) is not None:
            raise ConfigError(
                f"{name} is for the replicas of one model, and several models have an engine each: "
                "leave it out"
            )
    for model in models:
        if model.args.has_replicas or model.args.prefill_replicas:
            raise ConfigError(
                f"{model.args.model}: of several models, each has one engine: leave out "
                "data_parallel_size, prefill_replicas and distributed, or serve it alone"
            )
        if model.args.lora or model.args.enable_lora:
            raise ConfigError(
                f"{model.args.model}: adapters are of a server's only model: leave out lora and "
                "enable_lora, or serve it alone"
            )


def _budget(settings: ServerSettings, all_args: Sequence[EngineArgs]) -> int:
    """Return the bytes that all loaded models may take."""
    if settings.model_memory is not None:
        return parse_bytes(settings.model_memory)
    if any(num_gpus(args.device) is not None for args in all_args):
        raise ConfigError(
            "model_memory is needed with a GPU: how much of its memory all models may take "
            "together, such as 40GiB"
        )
    return machine.memory().available // 4 * 3
