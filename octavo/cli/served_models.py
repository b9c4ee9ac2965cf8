"""The models that ``octavo serve`` is given: as MODELs, or in the file of ``--config``.

In a file, each of ``models`` is a name, or has settings of its own: all flags of an engine, and
``name``, ``chat-template``, ``pin`` and ``load``, which says whether it is loaded at the start::

    max-num-seqs: 16                       # of all
    models:
      - smollm2-135m
      - {model: qwen2.5-coder-0.5b, name: coder, max-model-len: 4096, pin: true}

What the command line says counts for all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.cli import UsageError
from octavo.cli.config_file import parse_settings
from octavo.cli.engine_flags import add_engine_flags, engine_kwargs
from octavo.hub import DEFAULT_MODEL
from octavo.server.requested_model import RequestedModel
from octavo.settings.engine import EngineArgs


@dataclass(frozen=True)
class ServedModels:
    """``models``: the default one, where none was named. ``engine``: settings of all of them."""

    models: Sequence[RequestedModel]
    engine: Mapping[str, Any]
    are_named: bool

    @property
    def is_one(self) -> bool:
        """Whether it is one, with settings that are no more than those of all."""
        return len(self.models) == 1 and self.models[0].is_plain

    def args_of(self, model: str) -> EngineArgs:
        """Return the settings of an engine of a model that was not named."""
        return EngineArgs.from_kwargs(model, **self.engine)


def served_models(args: argparse.Namespace, said: Mapping[str, Any]) -> ServedModels:
    """Return the models of the arguments.

    Args:
        args: of the command line and of the file.
        said: settings of engines on the command line alone.

    Raises:
        UsageError: ``models`` of the file cannot be read.
    """
    engine = engine_kwargs(args)
    named = getattr(args, "model", [])
    names = [named] if isinstance(named, str) else list(named)
    models = [RequestedModel(EngineArgs.from_kwargs(name, **engine)) for name in names]
    listed = getattr(args, "models", [])
    if not isinstance(listed, list):
        raise UsageError(f"{args.config}: models is a list of names, or of settings with a model")
    for number, each in enumerate(listed):
        where = f"{args.config}: models[{number}]"
        models.append(_model_of(each, where, engine, said))
    are_named = bool(models)
    if not models:
        models = [RequestedModel(EngineArgs.from_kwargs(DEFAULT_MODEL, **engine))]
    return ServedModels(models, engine, are_named)


def _model_of(
    listed: Any, where: str, engine: Mapping[str, Any], said: Mapping[str, Any]
) -> RequestedModel:
    if isinstance(listed, str):
        listed = {"model": listed}
    if not isinstance(listed, Mapping) or not isinstance(listed.get("model"), str):
        raise UsageError(f"{where} has no model: write a name, or settings with model: NAME")
    settings = {str(name).replace("-", "_"): value for name, value in listed.items()}
    model = settings.pop("model")
    found = parse_settings(settings, where, _add_flags)
    own = engine_kwargs(found)
    return RequestedModel(
        EngineArgs.from_kwargs(model, **{**engine, **own, **said}),
        names=tuple(found.name),
        chat_template=found.chat_template,
        is_pinned=found.pin,
        loads_at_start=found.load,
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    switch = partial(parser.add_argument, action=argparse.BooleanOptionalAction)
    parser.add_argument("--name", action="append", default=[])
    parser.add_argument("--chat-template")
    switch("--pin", default=False)
    switch("--load", default=True)
    add_engine_flags(parser)
